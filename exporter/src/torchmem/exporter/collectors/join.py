"""The join of allocator and NVML: what a process holds on a GPU beside PyTorch's reserved memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.run_directory import Published
from torchmem.exporter.values import ProcessMemory
from torchmem.sample import catalog
from torchmem.sample.families import View, family
from torchmem.sample.sample import LIVE_STATES, DeviceSample

Processes = Mapping[tuple[str, int], ProcessMemory]


def collect(
    published: Sequence[Published], known: Mapping[str, GpuIdentity], processes: Processes
) -> Iterator[Metric]:
    """Bytes outside the allocator by GPU and rank.

    `known`: the GPU of each UUID, also of a MIG device's; `processes` by (UUID of GPU or MIG device, pid), as the
    exporter counts pids.

    Left out when either side is unknown, when the process behind the sample is not certain, and when the two were
    read so far apart that the difference would be negative.
    """
    gpus = {uuid: str(gpu.index) for uuid, gpu in known.items()}
    rows = []
    for item in published:
        if not item.attributed or item.state not in LIVE_STATES:
            continue
        view = View(item.sample, item.pid, item.state, gpus)
        for device in item.sample.devices:
            outside = _outside(device, processes.get((device.uuid or "", item.pid)))
            if outside is not None and outside >= 0:
                rows.append((view.device_labels(device), outside))
    yield family(catalog.OUTSIDE_ALLOCATOR, rows)


def _outside(device: DeviceSample, process: ProcessMemory | None) -> int | None:
    if device.allocator is None or process is None or process.used_bytes is None:
        return None
    return process.used_bytes - device.allocator.reserved_bytes.total
