"""Device memory."""

from __future__ import annotations

from typing import Any

from torchmem.exporter.nvml.binding import NOT_SUPPORTED, OTHER_VERSION, Door
from torchmem.exporter.values import Bar1, MemoryInfo

_CALL = ("nvmlDeviceGetMemoryInfo",)


def read(door: Door, handle: Any) -> MemoryInfo | None:
    """nvmlDeviceGetMemoryInfo_v2, else v1, whose `used` includes what the driver reserves."""
    info, code = door.newer(*_CALL, handle, version=door.module.nvmlMemory_v2)
    if code == 0:
        return MemoryInfo(info.total, info.used, info.free, info.reserved)
    info = door.ask(*_CALL, handle) if code in OTHER_VERSION else None
    return None if info is None else MemoryInfo(info.total, info.used, info.free, None)


def unified(door: Door, handle: Any) -> bool | None:
    """Whether NVML says of device memory that it is not supported, as on GB10, where CPU and GPU share one memory."""
    _, code = door.answer(_CALL, handle)
    return code == NOT_SUPPORTED if code in {0, NOT_SUPPORTED} else None


def bar1(door: Door, handle: Any) -> Bar1 | None:
    """nvmlDeviceGetBAR1MemoryInfo."""
    info = door.ask("nvmlDeviceGetBAR1MemoryInfo", handle)
    return None if info is None else Bar1(info.bar1Total, info.bar1Used)
