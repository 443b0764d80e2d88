"""Power draw, limits and energy."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family, known


def collect(reading: Reading) -> Iterator[Metric]:
    """Watts and joules of every GPU."""
    rows = [(gpu.labels, power) for gpu, power in reading.each(reading.nvml.power)]
    yield family(catalog.NVML_POWER, known((labels, power.watts) for labels, power in rows))
    yield family(
        catalog.NVML_POWER_LIMIT, known((labels, power.limit_watts) for labels, power in rows)
    )
    yield family(
        catalog.NVML_POWER_LIMIT_MAX,
        known((labels, power.limit_max_watts) for labels, power in rows),
    )
    yield family(
        catalog.NVML_ENERGY, known((labels, power.energy_joules) for labels, power in rows)
    )
