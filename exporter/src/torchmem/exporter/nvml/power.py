"""Power, heat and fans."""

from __future__ import annotations

from typing import Any

from torchmem.exporter.nvml.binding import Door, ratio, real, thousandths
from torchmem.exporter.values import Power, Temperatures

_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU, the only one of nvmlTemperatureSensors_t
_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_THRESHOLDS = {
    "shutdown": 0,
    "slowdown": 1,
    "memory_max": 2,
    "gpu_max": 3,
}  # nvmlTemperatureThresholds_t


def read(door: Door, handle: Any) -> Power:
    """Milliwatts and millijoules: usage, enforced limit, limit constraints, total energy consumption."""
    constraints = door.ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
    return Power(
        watts=thousandths(door.ask("nvmlDeviceGetPowerUsage", handle)),
        limit_watts=thousandths(door.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        limit_max_watts=None if constraints is None else thousandths(constraints[1]),
        energy_joules=thousandths(door.ask("nvmlDeviceGetTotalEnergyConsumption", handle)),
    )


def temperatures(door: Door, handle: Any) -> Temperatures:
    """nvmlDeviceGetTemperatureV, or the older call; the memory's from a field value; thresholds."""
    core = door.ask_first(
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), handle, _GPU_SENSOR
    )
    (memory,) = door.fields(handle, _MEMORY_TEMPERATURE)
    limits = {
        name: real(door.ask("nvmlDeviceGetTemperatureThreshold", handle, number))
        for name, number in _THRESHOLDS.items()
    }
    return Temperatures(_known({"gpu": real(core), "memory": memory}), _known(limits))


def _known(found: dict[str, int | None]) -> dict[str, float]:
    return {name: degrees for name, degrees in found.items() if degrees is not None}


def fans(door: Door, handle: Any) -> list[float | None]:
    """nvmlDeviceGetFanSpeed_v2 of every fan, percent; the one speed that older drivers tell."""
    count = door.ask("nvmlDeviceGetNumFans", handle)
    if count is not None:
        return [ratio(door.ask("nvmlDeviceGetFanSpeed_v2", handle, fan)) for fan in range(count)]
    speed = ratio(door.ask("nvmlDeviceGetFanSpeed", handle))
    return [] if speed is None else [speed]
