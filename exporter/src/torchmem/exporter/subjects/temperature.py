"""Temperatures, their thresholds, and fans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import NvmlDevice, plausible, ratio
from torchmem.metrics import catalog

_SENSOR = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU, the only one of nvmlTemperatureSensors_t
_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
# nvmlTemperatureThresholds_t
_THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
_MAX_CELSIUS = 300
_MAX_FANS = 64
_MAX_FAN_PERCENT = 200  # nvml.h: a speed may exceed 100%


@dataclass(frozen=True, slots=True)
class Temperatures(GpuValue):
    """Degrees Celsius by sensor (gpu, memory), and of the thresholds at which the GPU reacts."""

    sensors: Mapping[str, float | None] = series(catalog.NVML_TEMPERATURE, default_factory=dict)
    thresholds: Mapping[str, float | None] = series(
        catalog.NVML_TEMPERATURE_THRESHOLD, default_factory=dict
    )

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Temperatures:
        """Read the GPU's sensor, the memory's (a field value), and the thresholds."""
        core = _celsius(gpu.call_first(_SENSOR, _GPU_SENSOR))
        (memory,) = gpu.field_values(_MEMORY_TEMPERATURE)
        limits = {
            name: _celsius(gpu.constant("nvmlDeviceGetTemperatureThreshold", number))
            for name, number in _THRESHOLDS.items()
        }
        return cls({"gpu": core, "memory": _celsius(memory)}, limits)


@dataclass(frozen=True, slots=True)
class Fans(GpuValue):
    """Speed of each fan, as a ratio of its maximum."""

    speeds: Sequence[float | None] = series(
        catalog.NVML_FAN_SPEED, lambda speeds: dict(enumerate(speeds)), default=()
    )

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Fans:
        """Call nvmlDeviceGetFanSpeed_v2 for every fan (percent); older drivers have one speed."""
        count = plausible(gpu.call_seldom("nvmlDeviceGetNumFans"), _MAX_FANS)
        if count is not None:
            fans = range(count)
            return cls([_speed(gpu.call("nvmlDeviceGetFanSpeed_v2", fan)) for fan in fans])
        speed = _speed(gpu.call("nvmlDeviceGetFanSpeed"))
        return cls([] if speed is None else [speed])


def _celsius(degrees: int | None) -> int | None:
    return plausible(degrees, _MAX_CELSIUS)


def _speed(percent: int | None) -> float | None:
    return ratio(percent, _MAX_FAN_PERCENT)
