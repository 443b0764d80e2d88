"""Power draw, power limits and energy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.nvml import NvmlDevice, plausible, thousandths
from torchmem.exporter.reading import Reading
from torchmem.metrics import catalog
from torchmem.metrics.families import value_family

_MAX_MILLIWATTS = 100_000_000


@dataclass(frozen=True, slots=True)
class Power(GpuValue):
    """Draw, enforced limit and maximum limit in watts; energy in joules since the driver loaded."""

    watts: float | None = None
    limit_watts: float | None = None
    limit_max_watts: float | None = None
    energy_joules: float | None = None

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Power:
        """Read usage, limits and total energy consumption (milliwatts and millijoules).

        The call for the energy takes 3 to 5 ms of CPU time on an H200, so it is made seldom.
        """
        limits = gpu.constant("nvmlDeviceGetPowerManagementLimitConstraints")
        return cls(
            watts=_watts(gpu.call("nvmlDeviceGetPowerUsage")),
            limit_watts=_watts(gpu.call("nvmlDeviceGetEnforcedPowerLimit")),
            limit_max_watts=None if limits is None else _watts(limits[1]),
            energy_joules=thousandths(gpu.call_seldom("nvmlDeviceGetTotalEnergyConsumption")),
        )


def _watts(milliwatts: int | None) -> float | None:
    return thousandths(plausible(milliwatts, _MAX_MILLIWATTS))


def families(reading: Reading) -> Iterator[Metric]:
    """Yield watts and joules."""
    rows = reading.read(Power)
    yield value_family(catalog.NVML_POWER, rows, lambda power: power.watts)
    yield value_family(catalog.NVML_POWER_LIMIT, rows, lambda power: power.limit_watts)
    yield value_family(catalog.NVML_POWER_LIMIT_MAX, rows, lambda power: power.limit_max_watts)
    yield value_family(catalog.NVML_ENERGY, rows, lambda power: power.energy_joules)
