"""Train in a local job of submitit."""

import submitit
from training import train

executor = submitit.LocalExecutor(folder="log")
executor.update_parameters(timeout_min=5, gpus_per_node=1)
print("true steps", executor.submit(train).result())
