"""Clocks, the reasons that hold them down, and the performance state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import NvmlDevice, available, multiplied, plausible
from torchmem.metrics import catalog

_MEGAHERTZ = 1e6
_MAX_MEGAHERTZ = 100_000
_DOMAINS = ("graphics", "sm", "memory", "video")  # nvmlClockType_t 0 to 3
_EVENT_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",  # its name in older drivers
)
REASONS = {  # nvmlClocksEventReasons of nvml.h
    "gpu_idle": 0x001,
    "applications_clocks_setting": 0x002,
    "sw_power_cap": 0x004,
    "hw_slowdown": 0x008,
    "sync_boost": 0x010,
    "sw_thermal_slowdown": 0x020,
    "hw_thermal_slowdown": 0x040,
    "hw_power_brake_slowdown": 0x080,
    "display_clock_setting": 0x100,
}
_PERFORMANCE_STATES = range(16)  # nvmlPstates_t; 32 is unknown


@dataclass(frozen=True, slots=True)
class Clocks(GpuValue):
    """Hertz by domain (graphics, sm, memory, video), current and maximum.

    `throttle`: each reason for a lower clock, and whether it is active; `performance_state`: from
    0 (fastest) to 15.
    """

    hertz: Mapping[str, float | None] = series(catalog.NVML_CLOCK, default_factory=dict)
    max_hertz: Mapping[str, float | None] = series(catalog.NVML_CLOCK_MAX, default_factory=dict)
    throttle: Mapping[str, bool] = series(catalog.NVML_THROTTLE, default_factory=dict)
    performance_state: int | None = series(catalog.NVML_PERFORMANCE_STATE)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Clocks:
        """Read clocks (MHz), clocks event reasons (a bit mask) and the performance state."""
        reasons = gpu.call_first(_EVENT_REASONS)
        state = gpu.call("nvmlDeviceGetPerformanceState")
        return cls(
            hertz=_hertz(partial(gpu.call, "nvmlDeviceGetClockInfo")),
            max_hertz=_hertz(partial(gpu.constant, "nvmlDeviceGetMaxClockInfo")),
            throttle={} if reasons is None else _throttle(reasons),
            performance_state=state if available(state) in _PERFORMANCE_STATES else None,
        )


def _throttle(reasons: int) -> dict[str, bool]:
    return {reason: bool(reasons & bit) for reason, bit in REASONS.items()}


def _hertz(megahertz: Callable[[int], int | None]) -> dict[str, float | None]:
    return {
        domain: multiplied(plausible(megahertz(number), _MAX_MEGAHERTZ), _MEGAHERTZ)
        for number, domain in enumerate(_DOMAINS)
    }
