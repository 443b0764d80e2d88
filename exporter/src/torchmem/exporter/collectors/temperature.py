"""Temperatures by sensor, and the thresholds at which the GPU protects itself."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family


def collect(reading: Reading) -> Iterator[Metric]:
    """Degrees Celsius of the GPU and, where it has a sensor, of its memory."""
    found = reading.each(reading.nvml.temperatures)
    sensors = [
        ((*gpu.labels, name), value) for gpu, heat in found for name, value in heat.sensors.items()
    ]
    yield family(catalog.NVML_TEMPERATURE, sensors)
    limits = [
        ((*gpu.labels, name), value)
        for gpu, heat in found
        for name, value in heat.thresholds.items()
    ]
    yield family(catalog.NVML_TEMPERATURE_THRESHOLD, limits)
