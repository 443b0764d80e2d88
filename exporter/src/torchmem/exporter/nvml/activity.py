"""How busy the engines are, how fast they are clocked, and what holds the clocks down."""

from __future__ import annotations

from typing import Any

from torchmem.exporter.nvml.binding import Door, ratio, real, scaled
from torchmem.exporter.values import Clocks, Utilization

_MEGAHERTZ = 1e6
_DOMAINS = ("graphics", "sm", "memory", "video")  # nvmlClockType_t 0 to 3
_REASONS = {  # nvmlClocksEventReasons of nvml.h
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
_FASTEST_TO_SLOWEST = range(16)  # nvmlPstates_t; 32 is unknown


def utilization(door: Door, handle: Any) -> Utilization:
    """nvmlDeviceGetUtilizationRates and the media engines' calls, percent."""
    rates = door.ask("nvmlDeviceGetUtilizationRates", handle)
    return Utilization(
        gpu=None if rates is None else ratio(rates.gpu),
        memory=None if rates is None else ratio(rates.memory),
        encoder=_engine(door, "nvmlDeviceGetEncoderUtilization", handle),
        decoder=_engine(door, "nvmlDeviceGetDecoderUtilization", handle),
        jpeg=_engine(door, "nvmlDeviceGetJpgUtilization", handle),
        ofa=_engine(door, "nvmlDeviceGetOfaUtilization", handle),
    )


def _engine(door: Door, name: str, handle: Any) -> float | None:
    """Percent, and the sampling period in microseconds, which nobody needs."""
    found = door.ask(name, handle)
    return None if found is None else ratio(found[0])


def clocks(door: Door, handle: Any) -> Clocks:
    """nvmlDeviceGetClockInfo and nvmlDeviceGetMaxClockInfo (MHz), clocks event reasons, performance state."""
    reasons = (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    )
    bits = door.ask_first(reasons, handle)
    state = door.ask("nvmlDeviceGetPerformanceState", handle)
    return Clocks(
        hertz=_hertz(door, "nvmlDeviceGetClockInfo", handle),
        max_hertz=_hertz(door, "nvmlDeviceGetMaxClockInfo", handle),
        throttle={}
        if bits is None
        else {reason: bool(bits & bit) for reason, bit in _REASONS.items()},
        performance_state=state if real(state) in _FASTEST_TO_SLOWEST else None,
    )


def _hertz(door: Door, name: str, handle: Any) -> dict[str, float]:
    found = {
        domain: scaled(door.ask(name, handle, number), _MEGAHERTZ)
        for number, domain in enumerate(_DOMAINS)
    }
    return {domain: hertz for domain, hertz in found.items() if hertz is not None}
