"""Device memory: used + free + reserved = total where the driver tells what it reserves."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.core import catalog
from torchmem.core.families import family
from torchmem.exporter.reading import Reading


def collect(reading: Reading) -> Iterator[Metric]:
    """Total, used, free and reserved bytes of every GPU."""
    rows = [(gpu.labels, info) for gpu, info in reading.each(reading.nvml.memory)]
    yield family(catalog.NVML_MEMORY_TOTAL, [(labels, info.total) for labels, info in rows])
    yield family(catalog.NVML_MEMORY_USED, [(labels, info.used) for labels, info in rows])
    yield family(catalog.NVML_MEMORY_FREE, [(labels, info.free) for labels, info in rows])
    reserved = [(labels, info.reserved) for labels, info in rows if info.reserved is not None]
    yield family(catalog.NVML_MEMORY_RESERVED, reserved)
