"""The choices above each dashboard, from left to right; each narrows the ones to its right."""

from __future__ import annotations

from dataclasses import replace

from dashboards.panels import Choice
from dashboards.queries.select import variable_gpus, variable_runs_or_none, variable_values

from torchmem.sample import catalog

_UUID_AND_PLACE = '/uuid="(?<value>[^"]+)".*where="(?<text>[^"]+)"/'

RUN = Choice("run", "Run", variable_values(catalog.PROCESS_STATE, "run"))
RANK = Choice("rank", "Rank", variable_values(catalog.PROCESS_STATE, "rank", "run", "instance"))
NODE = Choice("node", "Node", variable_values(catalog.PROCESS_STATE, "instance", "run"))
GPU = Choice("gpu", "GPU", variable_gpus(catalog.RESERVED_PEAK, "instance", "run"), _UUID_AND_PLACE)
COMPARE = Choice(
    "compare", "Compare with run", variable_runs_or_none(), '/run="([^"]+)"/', single="none"
)

# Where training is the subject.
TRAINING = (RUN, NODE, GPU, RANK)

# Where nodes are: also those on which nothing trains, and GPUs that no rank uses.
ANY_NODE = replace(NODE, query=variable_values(catalog.BUILD_INFO, "instance"))
ANY_GPU = replace(GPU, query=variable_gpus(catalog.NVML_GPU_UP, "instance"))
NODES = (replace(RUN, hidden=True), ANY_NODE, ANY_GPU, replace(RANK, hidden=True))
EVERYTHING = (RUN, ANY_NODE, ANY_GPU, RANK)
