"""Train in a worker of Dask."""

from dask.distributed import Client, LocalCluster
from training import train

if __name__ == "__main__":
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:
        print("true steps", client.submit(train).result())
