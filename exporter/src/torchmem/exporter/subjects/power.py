"""Power draw, power limits and energy."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import NvmlDevice, plausible, thousandths
from torchmem.metrics import catalog

_MAX_MILLIWATTS = 100_000_000


@dataclass(frozen=True, slots=True)
class Power(GpuValue):
    """Draw, enforced limit and maximum limit in watts; energy in joules since the driver loaded."""

    watts: float | None = series(catalog.NVML_POWER)
    limit_watts: float | None = series(catalog.NVML_POWER_LIMIT)
    limit_max_watts: float | None = series(catalog.NVML_POWER_LIMIT_MAX)
    energy_joules: float | None = series(catalog.NVML_ENERGY)

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
