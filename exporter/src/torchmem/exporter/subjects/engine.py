"""Whether a sleeping inference engine could wake up now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.subjects.outside_allocator import ProcessUse, live_devices
from torchmem.metrics import catalog
from torchmem.metrics.families import family
from torchmem.node.published import Published


def engine_families(
    published: Sequence[Published],
    uses: Mapping[tuple[str, int], ProcessUse],
    gpus: Mapping[str, GpuIdentity],
) -> Iterator[Metric]:
    """Yield what is free on the device beyond what a sleeping engine takes when it wakes up.

    An engine wakes up with the driver's free memory alone: vLLM's allocator calls cuMemCreate.
    """
    indices = {uuid: str(gpu.index) for uuid, gpu in gpus.items()}
    rows = []
    for item, device, use in live_devices(published, uses):
        if device.engine and device.engine.asleep and use and use.free_bytes is not None:
            margin = use.free_bytes - device.engine.asleep_bytes
            rows.append((item.view(indices).device_labels(device), margin))
    yield family(catalog.ENGINE_WAKE_MARGIN, rows)
