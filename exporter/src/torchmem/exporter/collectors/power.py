"""Power draw."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.core import catalog
from torchmem.core.families import family
from torchmem.exporter.reading import Reading


def collect(reading: Reading) -> Iterator[Metric]:
    """Watts of every GPU."""
    yield family(catalog.NVML_POWER, [(gpu.labels, watts) for gpu, watts in reading.each(reading.nvml.power_watts)])
