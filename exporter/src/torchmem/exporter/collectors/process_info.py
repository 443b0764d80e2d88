"""Who each process on a GPU is: what the kernel says of it, and which rank of which run it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuLabels
from torchmem.exporter.process_owners import ProcessOwners
from torchmem.exporter.run_directory import Published
from torchmem.sample import catalog
from torchmem.sample.families import info


def collect(
    shown: Mapping[GpuLabels, Sequence[int]], published: Sequence[Published], owners: ProcessOwners
) -> Iterator[Metric]:
    """Facts of the processes `shown` by GPU, whose pids must count as the exporter's do.

    A rank is named only when the sample is certainly this process's: a pid alone is no proof.
    """
    ranks = {item.pid: _rank(item) for item in published if item.attributed}
    facts = {pid: owners.labels(pid) for pid in {pid for pids in shown.values() for pid in pids}}
    rows = [
        ((*labels, str(pid)), {**facts[pid], **ranks.get(pid, {})})
        for labels, pids in shown.items()
        for pid in pids
    ]
    yield info(catalog.NVML_PROCESS_INFO, [row for row in rows if row[1]])


def _rank(item: Published) -> Mapping[str, str]:
    process = item.sample.process
    return {"rank": str(process.rank), "run": process.run}
