"""Reads what PyTorch's CUDA allocator reports: statistics, snapshots, settings, history.

Takes the torch module as an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torchmem.allocator.backend import TraceEntry
from torchmem.allocator.settings import LAST_PARSED, NO_CACHING, parse_alloc_conf
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sdk.pytorch.history_recording import OwnRecording
from torchmem.sdk.pytorch.snapshot_call import NO_POOL, SnapshotCall

# CudaMallocAsyncAllocator::getDeviceStats fills in these (c10/cuda/CUDAMallocAsyncAllocator.cpp,
# 2.13).
ASYNC_STATS = ("allocated_bytes", "active_bytes", "reserved_bytes")


class AllocatorReader:
    """Reads the allocator, and omits what its backend does not keep and PyTorch fills with zeros.

    Supports torch from 2.1 on. Every call needs CUDA to be up.
    """

    def __init__(self, torch: Any, environment: Mapping[str, str]) -> None:
        self._torch = torch
        self._environment = environment
        self._settings: dict[str, str] | None = None
        self.recording = OwnRecording(torch, self.history_enabled)
        parameters = inspect.signature(torch.cuda.memory.memory_snapshot).parameters
        # Since 2.11; before, a snapshot always copies the user's whole recorded history.
        self.can_skip_traces = "include_traces" in parameters
        self._arguments = (None,) if "mempool_id" in parameters else ()  # since 2.8
        call: Any = getattr(torch._C, "_cuda_memorySnapshot", None)  # noqa: SLF001 - absent without CUDA
        self._segments_call = SnapshotCall(call, traces=False)
        self._traces_call = SnapshotCall(call, NO_POOL, traces=True)

    def backend(self) -> str:
        """Return `torch.cuda.get_allocator_backend()`: native, cudaMallocAsync, or pluggable."""
        return str(self._torch.cuda.get_allocator_backend())

    def kept_stats(self, stats: NestedStats) -> NestedStats | None:
        """Return the nested statistics that this backend counts, or None if it counts none."""
        if self.backend() == "cudaMallocAsync":
            kept = ((name, stats[name]["all"]) for name in ASYNC_STATS)
            return {
                name: {"all": {part: value[part] for part in ("current", "peak")}}
                for name, value in kept
            }
        if stats and stats["reserved_bytes"]["all"]["peak"] == 0 and self._is_caching_off():
            return None
        return stats or None

    def segments(self) -> list[SegmentInfo] | None:
        """Return all segments of a snapshot without traces, or None where there are none."""
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
        """Return the whole snapshot without traces.

        None if the allocator is not native, or while history is recorded that cannot be left out.
        """
        if self.backend() != "native" or (not self.can_skip_traces and self._has_long_history()):
            return None
        if self.can_skip_traces:
            return self._segments_call()
        read = self._torch._C._cuda_memorySnapshot  # noqa: SLF001
        return cast("Mapping[str, Any]", read(*self._arguments))

    def _has_long_history(self) -> bool:
        """Return whether a snapshot would copy more than the one entry beside our stacks."""
        return self.history_enabled() and self.recording.kind != "stacks"

    def traces(self) -> list[list[TraceEntry]]:
        """Return the recorded history of each device, without any segment (since 2.11).

        Asks for the segments of a pool that does not exist.
        """
        return cast("list[list[TraceEntry]]", self._traces_call()["device_traces"])

    def history_enabled(self) -> bool:
        """Return `torch._C._cuda_isHistoryEnabled()` (since 2.1).

        Before CUDA is up that call would crash the process.
        """
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001
        return bool(enabled()) if enabled else False

    def settings(self) -> dict[str, str]:
        """Return the backend's name and the settings in the newest snapshot (since 2.3).

        Takes a snapshot if there was none.
        """
        if self._settings is None:
            self.segments()
        return {**(self._settings or {}), "backend": self.backend()}

    def fraction(self, device: int) -> float | None:
        """Return `get_per_process_memory_fraction`, or None before 2.6, which lacks it."""
        read = getattr(self._torch.cuda.memory, "get_per_process_memory_fraction", None)
        return None if read is None else float(read(device))

    def _is_caching_off(self) -> bool:
        """Return whether allocations may bypass the cache, so that zero statistics mean nothing."""
        enabled = getattr(self._torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # noqa: SLF001
        return any(name in self._environment for name in NO_CACHING) or (
            enabled is not None and not enabled()
        )


def settings_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a snapshot's settings as text by lower-case name.

    Includes settings that were parsed but are missing in the snapshot. PyTorch's −1, which means
    "unlimited", is left out, and so is what was not set.
    """
    flat = {
        name.lower(): str(value)
        for name, value in settings.items()
        if not isinstance(value, dict) and value != -1
    }
    divisions = settings.get("roundup_power2_divisions", {})
    flat["roundup_power2_divisions"] = ",".join(
        f"{size}:{count}" for size, count in divisions.items() if count
    )
    parsed = parse_alloc_conf(flat.get(LAST_PARSED, ""))
    # The snapshot has it in bytes, as max_split_size.
    parsed.pop("max_split_size_mb", None)
    return {name: text for name, text in (parsed | flat).items() if text}
