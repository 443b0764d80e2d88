"""Device memory, the BAR1 window, and whether GPU and CPU share one memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.nvml import NOT_SUPPORTED, OTHER_VERSION, Device
from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family, known

_MEMORY_INFO = "nvmlDeviceGetMemoryInfo"


@dataclass(frozen=True, slots=True)
class MemoryInfo(GpuValue):
    """Device memory in bytes: used + free + reserved = total.

    On drivers that do not report `reserved`, `used` includes it.
    """

    total: int
    used: int
    free: int
    reserved: int | None

    @classmethod
    def read(cls, gpu: Device) -> MemoryInfo | None:
        """Call nvmlDeviceGetMemoryInfo_v2, or v1 on drivers before 510."""
        nvml = gpu.nvml
        version = nvml.module.nvmlMemory_v2
        info, code = nvml.try_call(_MEMORY_INFO, gpu.handle, version=version)
        if code == 0:
            return cls(info.total, info.used, info.free, info.reserved)
        if code not in OTHER_VERSION:
            nvml.check(_MEMORY_INFO, code)
            return None
        info = gpu.call(_MEMORY_INFO)
        return None if info is None else cls(info.total, info.used, info.free, None)


@dataclass(frozen=True, slots=True)
class UnifiedMemory(GpuValue):
    """Whether the GPU has no memory of its own but shares the CPU's, as on GB10."""

    shared: bool

    @classmethod
    def read(cls, gpu: Device) -> UnifiedMemory | None:
        """Return whether nvmlDeviceGetMemoryInfo is not supported."""
        _, code = gpu.nvml.try_call(_MEMORY_INFO, gpu.handle)
        gpu.nvml.check(_MEMORY_INFO, code)
        return cls(code == NOT_SUPPORTED) if code in {0, NOT_SUPPORTED} else None


@dataclass(frozen=True, slots=True)
class Bar1(GpuValue):
    """The window through which the CPU and other devices access device memory, in bytes."""

    total: int
    used: int

    @classmethod
    def read(cls, gpu: Device) -> Bar1 | None:
        """Call nvmlDeviceGetBAR1MemoryInfo."""
        info = gpu.call("nvmlDeviceGetBAR1MemoryInfo")
        return None if info is None else cls(info.bar1Total, info.bar1Used)


def families(reading: Reading) -> Iterator[Metric]:
    """Yield total, used, free and reserved bytes, unified memory, and BAR1 bytes."""
    rows = reading.read(MemoryInfo)
    yield family(catalog.NVML_MEMORY_TOTAL, [(labels, memory.total) for labels, memory in rows])
    yield family(catalog.NVML_MEMORY_USED, [(labels, memory.used) for labels, memory in rows])
    yield family(catalog.NVML_MEMORY_FREE, [(labels, memory.free) for labels, memory in rows])
    reserved = known((labels, memory.reserved) for labels, memory in rows)
    yield family(catalog.NVML_MEMORY_RESERVED, reserved)
    unified = reading.read(UnifiedMemory)
    yield family(
        catalog.NVML_UNIFIED_MEMORY, [(labels, float(value.shared)) for labels, value in unified]
    )
    bar1 = reading.read(Bar1)
    yield family(catalog.NVML_BAR1_TOTAL, [(labels, window.total) for labels, window in bar1])
    yield family(catalog.NVML_BAR1_USED, [(labels, window.used) for labels, window in bar1])
