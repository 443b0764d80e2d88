"""Temperatures by sensor."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.core import catalog
from torchmem.core.families import family
from torchmem.exporter.reading import Reading


def collect(reading: Reading) -> Iterator[Metric]:
    """Degrees Celsius of the GPU and, where it has a sensor, of its memory."""
    sensors = reading.each(reading.nvml.temperatures)
    rows = [((*gpu.labels, sensor), degrees) for gpu, found in sensors for sensor, degrees in found.items()]
    yield family(catalog.NVML_TEMPERATURE, rows)
