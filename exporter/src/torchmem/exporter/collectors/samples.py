"""The run directory: what every training process last said about its allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.run_directory import Published
from torchmem.sample.families import View, families


def collect(published: Sequence[Published], known: Mapping[str, GpuIdentity]) -> Iterator[Metric]:
    """All series of all processes; `known` gives the GPU of each UUID, also of a MIG device's."""
    gpus = {uuid: str(gpu.index) for uuid, gpu in known.items()}
    return families([View(item.sample, item.pid, item.state, gpus) for item in published])
