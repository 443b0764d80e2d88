"""Device memory, the BAR1 window, and whether GPU and CPU share one memory."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from torchmem.explain.parts import MAX_GPU_BYTES
from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, OTHER_VERSION, NvmlDevice
from torchmem.metrics import catalog

_ROUNDING_BYTES = 1 << 20
"""What the parts may be more than the whole, where a driver counts them in pages."""
_MEMORY_INFO = "nvmlDeviceGetMemoryInfo"
_BAR1_INFO = "nvmlDeviceGetBAR1MemoryInfo"


class ImpossibleMemoryError(ValueError):
    """Parts of memory that are below zero or more than the whole; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryInfo(GpuValue):
    """Device memory in bytes: used + free + reserved = total.

    On drivers that do not report `reserved`, `used` includes it. Raises ImpossibleMemoryError if a
    part is below zero or the parts are more than the whole.
    """

    total: int = series(catalog.NVML_MEMORY_TOTAL, default=MISSING)
    used: int = series(catalog.NVML_MEMORY_USED, default=MISSING)
    free: int = series(catalog.NVML_MEMORY_FREE, default=MISSING)
    reserved: int | None = series(catalog.NVML_MEMORY_RESERVED, default=MISSING)

    def __post_init__(self) -> None:
        parts = (self.used, self.free, self.reserved or 0)
        fits = sum(parts) <= self.total + _ROUNDING_BYTES
        if min(parts) < 0 or not fits or self.total > MAX_GPU_BYTES:
            raise ImpossibleMemoryError(
                f"{self.used} bytes used, {self.free} free and {self.reserved or 0} reserved of "
                f"{self.total}"
            )

    @property
    def usable(self) -> int:
        """Bytes that are not kept by the driver for itself."""
        return self.total - (self.reserved or 0)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> MemoryInfo | None:
        """Call nvmlDeviceGetMemoryInfo_v2, or v1 on drivers before 510 and with an old pynvml."""
        nvml = gpu.nvml
        info: Any = None
        code, version = FUNCTION_NOT_FOUND, getattr(nvml.module, "nvmlMemory_v2", None)
        if version is not None:
            info, code = nvml.try_call(_MEMORY_INFO, gpu.handle, version=version)
        if code == 0:
            return cls._of(gpu, info.total, info.used, info.free, info.reserved)
        if code not in OTHER_VERSION:
            nvml.check(_MEMORY_INFO, code)
            return None
        info = gpu.call(_MEMORY_INFO)
        return None if info is None else cls._of(gpu, info.total, info.used, info.free, None)

    @classmethod
    def _of(
        cls, gpu: NvmlDevice, total: int, used: int, free: int, reserved: int | None
    ) -> MemoryInfo | None:
        try:
            return cls(total, used, free, reserved)
        except ImpossibleMemoryError as error:
            gpu.nvml.missing_values.note_impossible(_MEMORY_INFO, str(error))
            return None


@dataclass(frozen=True, slots=True)
class UnifiedMemory(GpuValue):
    """Whether the GPU has no memory of its own but shares the CPU's, as on GB10."""

    shared: bool = series(catalog.NVML_UNIFIED_MEMORY, default=MISSING)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> UnifiedMemory | None:
        """Return whether nvmlDeviceGetMemoryInfo is not supported."""
        code = gpu.seldom(_memory_code)
        return cls(code == NOT_SUPPORTED) if code in {0, NOT_SUPPORTED} else None


@dataclass(frozen=True, slots=True)
class Bar1(GpuValue):
    """The window through which the CPU and other devices access device memory, in bytes."""

    total: int = series(catalog.NVML_BAR1_TOTAL, default=MISSING)
    used: int = series(catalog.NVML_BAR1_USED, default=MISSING)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Bar1 | None:
        """Call nvmlDeviceGetBAR1MemoryInfo."""
        info = gpu.call_seldom(_BAR1_INFO)
        if info is None:
            return None
        total, used = info.bar1Total, info.bar1Used
        if not used <= total <= MAX_GPU_BYTES:
            text = f"{used} bytes used of {total}"
            gpu.nvml.missing_values.note_impossible(_BAR1_INFO, text)
            return None
        return cls(total, used)


def _memory_code(gpu: NvmlDevice) -> int:
    _, code = gpu.nvml.try_call(_MEMORY_INFO, gpu.handle)
    gpu.nvml.check(_MEMORY_INFO, code)
    return code
