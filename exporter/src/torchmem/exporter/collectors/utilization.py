"""How busy the engines are."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family


def collect(reading: Reading) -> Iterator[Metric]:
    """Ratios by engine."""
    rates = reading.each(reading.nvml.utilization)
    rows = [
        ((*gpu.labels, engine), ratio) for gpu, rate in rates for engine, ratio in rate.ratios()
    ]
    yield family(catalog.NVML_UTILIZATION, rows)
