"""Memory history of this process, with the facts that a replay needs and PyTorch leaves out.

A trace that begins in the middle of a run shows neither the sizes of earlier blocks nor the limits
of the process (docs/recordings.md#capture-a-running-rank).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchmem.allocator.backend import Backend, Device
from torchmem.sample.capture_messages import DEFAULT_ENTRIES, FACTS_KEY

OOM_TRACE_ENTRIES = 300_000
SEGMENT_KEYS = (
    "device",
    "address",
    "total_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
)
BLOCK_KEYS = ("address", "size", "requested_size", "state")


class RecordedHistory:
    """Records history on one backend, from `start` or `start_trace` to `stop`.

    `allocated_peaks` returns the highest allocated bytes of each device since the process began.
    """

    def __init__(self, backend: Backend, allocated_peaks: Callable[[], Mapping[int, int]]) -> None:
        self.backend = backend
        self._allocated_peaks = allocated_peaks
        self._facts: dict[str, Any] = {}

    def start(self, max_entries: int = DEFAULT_ENTRIES) -> bool:
        """Start recording, and then read the memory.

        In this order: memory that another thread allocates in between would otherwise be missed.
        Return False if history is being recorded already.
        """
        if not self.backend.start_history(max_entries):
            return False
        try:
            self._facts = self._read_facts(max_entries)
        except BaseException:
            self.stop()
            raise
        return True

    def start_trace(self) -> bool:
        """Start recording without stacks in the same way. Return False if that is impossible."""
        is_started = self.backend.start_trace(OOM_TRACE_ENTRIES, complete=True)
        if is_started:
            self._facts = self._read_facts(OOM_TRACE_ENTRIES)
        return is_started

    def snapshot(self) -> Mapping[str, Any] | None:
        """Return the history with the facts; None if this allocator has none."""
        snapshot = self.backend.full_snapshot(traces=True)
        return None if snapshot is None else {**snapshot, FACTS_KEY: self._facts}

    def trace(self) -> Mapping[str, Any] | None:
        """Return the history with the allocated peaks so far, which a full ring has lost."""
        for index, peak in self._allocated_peaks().items():
            self._facts["devices"].setdefault(index, {})["allocated_peak_bytes"] = peak
        return self.snapshot()

    def stop(self) -> None:
        """Stop recording, and discard what was recorded."""
        self.backend.stop_history()

    def _read_facts(self, max_entries: int) -> dict[str, Any]:
        snapshot = self.backend.full_snapshot(traces=False)
        # Before PyTorch 2.11, a snapshot has the entries of a recording that runs.
        snapshot = snapshot or self.backend.full_snapshot(traces=True) or {}
        return {
            "versions": dict(self.backend.versions()),
            "max_entries": max_entries,
            "segments": [plain_segment(segment) for segment in snapshot.get("segments", ())],
            "devices": self._devices(),
        }

    def _devices(self) -> dict[int, dict[str, int]]:
        peaks = self._allocated_peaks()
        return {
            device.index: self._device(device, peaks.get(device.index))
            for device in self.backend.devices()
        }

    def _device(self, device: Device, allocated_peak: int | None) -> dict[str, int]:
        """Return the known bytes by name."""
        stats = self.backend.memory_stats(device.index)
        known: dict[str, int | None] = {
            "total_bytes": device.total_bytes,
            "limit_bytes": self.backend.limit_bytes(device.index),
            "free_bytes": self.backend.free_bytes(device.index),
            "reserved_bytes": stats["reserved_bytes"]["all"]["current"] if stats else None,
            "allocated_peak_bytes": allocated_peak,
        }
        return {name: value for name, value in known.items() if value is not None}


def kept_seconds(snapshot: Mapping[str, Any], max_entries: int) -> tuple[bool, float | None]:
    """Return whether entries of a GPU were overwritten, and the seconds that the others span.

    An entry has `time_us` since PyTorch 2.3; the seconds are None before.
    """
    full = [trace for trace in snapshot.get("device_traces", ()) if len(trace) >= max_entries]
    times = [(trace[0].get("time_us"), trace[-1].get("time_us")) for trace in full]
    spans = [last - first for first, last in times if first is not None and last is not None]
    return bool(full), min(spans) / 1e6 if spans else None


def plain_segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    """Return a segment of a snapshot without what a replay does not need, such as stacks."""
    blocks = [
        {key: block[key] for key in BLOCK_KEYS if key in block} for block in segment["blocks"]
    ]
    return {key: segment[key] for key in SEGMENT_KEYS if key in segment} | {"blocks": blocks}
