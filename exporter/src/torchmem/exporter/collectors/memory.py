"""Device memory: used + free + reserved = total where the driver tells what it reserves."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family


def collect(reading: Reading) -> Iterator[Metric]:
    """Total, used, free and reserved bytes of every GPU, or that it has no memory of its own; the BAR1 window."""
    rows = [(gpu.labels, info) for gpu, info in reading.each(reading.nvml.memory)]
    yield family(catalog.NVML_MEMORY_TOTAL, [(labels, info.total) for labels, info in rows])
    yield family(catalog.NVML_MEMORY_USED, [(labels, info.used) for labels, info in rows])
    yield family(catalog.NVML_MEMORY_FREE, [(labels, info.free) for labels, info in rows])
    reserved = [(labels, info.reserved) for labels, info in rows if info.reserved is not None]
    yield family(catalog.NVML_MEMORY_RESERVED, reserved)
    unified = reading.each(reading.nvml.unified_memory)
    yield family(
        catalog.NVML_UNIFIED_MEMORY, [(gpu.labels, float(shared)) for gpu, shared in unified]
    )
    bar1 = reading.each(reading.nvml.bar1)
    yield family(catalog.NVML_BAR1_TOTAL, [(gpu.labels, window.total) for gpu, window in bar1])
    yield family(catalog.NVML_BAR1_USED, [(gpu.labels, window.used) for gpu, window in bar1])
