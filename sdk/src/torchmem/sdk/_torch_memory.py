"""What each of PyTorch's allocator backends really keeps: statistics, snapshots and settings, from torch 2.1 on.

The torch module is passed by argument; every call needs CUDA to be up, and creates nothing.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Mapping
from typing import Any, cast

from torchmem.core.alloc_conf import LAST_PARSED, parse_alloc_conf
from torchmem.core.snapshot import NestedStats, SegmentInfo

NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
# CudaMallocAsyncAllocator::getDeviceStats fills in these (c10/cuda/CUDAMallocAsyncAllocator.cpp, 2.13).
ASYNC_STATS = ("allocated_bytes", "active_bytes", "reserved_bytes")


class AllocatorReader:
    """Reads the allocator and leaves out what its backend does not keep, which PyTorch fills with zeros."""

    def __init__(self, torch: Any, environment: Mapping[str, str]) -> None:
        self._torch = torch
        self._environment = environment
        self._settings: dict[str, str] | None = None
        parameters = inspect.signature(torch.cuda.memory.memory_snapshot).parameters
        # Since 2.11; before, a snapshot always copies the user's whole recorded history.
        self.can_skip_traces = "include_traces" in parameters
        pool = (None,) if "mempool_id" in parameters else ()  # since 2.8
        self._arguments: tuple[object, ...] = ((0, 0, False),) if self.can_skip_traces else pool

    def backend(self) -> str:
        """`torch.cuda.get_allocator_backend()`: native, cudaMallocAsync or pluggable."""
        return str(self._torch.cuda.get_allocator_backend())

    def kept_stats(self, stats: NestedStats) -> NestedStats | None:
        """The nested statistics without what this backend never counts; None when that is all of them."""
        if self.backend() == "cudaMallocAsync":
            kept = ((name, stats[name]["all"]) for name in ASYNC_STATS)
            return {name: {"all": {part: value[part] for part in ("current", "peak")}} for name, value in kept}
        if stats and stats["reserved_bytes"]["all"]["peak"] == 0 and self._is_caching_off():
            return None
        return stats or None

    def segments(self) -> list[SegmentInfo] | None:
        """All segments of a snapshot without traces; None where there are none to have, see `snapshot`."""
        raw = self.snapshot()
        if raw is None:
            return None
        self._settings = settings_text(raw.get("allocator_settings", {}))
        segments = cast("list[SegmentInfo]", raw["segments"])
        if not segments and self._is_caching_off():
            self._settings["caching"] = "False"
            return None
        return segments

    def snapshot(self) -> Mapping[str, Any] | None:
        """The whole snapshot; None if not native, or while history is recorded that cannot be left out."""
        if self.backend() != "native" or (not self.can_skip_traces and self.history_enabled()):
            return None
        if self.can_skip_traces:
            lend((0, 0, False))
        return cast("Mapping[str, Any]", self._torch._C._cuda_memorySnapshot(*self._arguments))  # noqa: SLF001

    def history_enabled(self) -> bool:
        """`torch._C._cuda_isHistoryEnabled` (since 2.1), which would crash the process before CUDA is up."""
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001
        return bool(enabled()) if enabled else False

    def settings(self) -> dict[str, str]:
        """The settings in effect at the newest snapshot (in it since 2.3), and the backend; takes one if need be."""
        if self._settings is None:
            self.segments()
        return {**(self._settings or {}), "backend": self.backend()}

    def fraction(self, device: int) -> float | None:
        """`get_per_process_memory_fraction`; None before 2.6, where it cannot be read."""
        read = getattr(self._torch.cuda.memory, "get_per_process_memory_fraction", None)
        return None if read is None else float(read(device))

    def _is_caching_off(self) -> bool:
        """Whether allocations may go past the cache, so that statistics which were never touched mean nothing."""
        enabled = getattr(self._torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # noqa: SLF001
        return any(name in self._environment for name in NO_CACHING) or (enabled is not None and not enabled())


def lend(members: tuple[object, ...]) -> None:
    """Give one more reference to each member of the tuple that `_cuda_memorySnapshot` gets.

    PyTorch takes one from each at every call and never gives it back (pytorch/pytorch, pull request 196366). Before
    Python 3.12, where such objects became immortal, `False` would have none left after some 20,000 snapshots, about
    two days, and Python would abort the training. Where PyTorch is right one too many does no harm.
    """
    if sys.version_info < (3, 12):
        for member in members:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(member))


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Flat text by lower-case name, with what was parsed but is not in the snapshot.

    −1 stands for "unlimited" in PyTorch and is left out, as is what was not set.
    """
    flat = {name.lower(): str(value) for name, value in settings.items() if not isinstance(value, dict) and value != -1}
    divisions = settings.get("roundup_power2_divisions", {})
    flat["roundup_power2_divisions"] = ",".join(f"{size}:{count}" for size, count in divisions.items() if count)
    parsed = parse_alloc_conf(flat.get(LAST_PARSED, ""))
    parsed.pop("max_split_size_mb", None)
    return {name: text for name, text in (parsed | flat).items() if text}
