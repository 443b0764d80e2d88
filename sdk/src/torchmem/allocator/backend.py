"""The door between the SDK and an allocator: PyTorch's own (sdk/torch_backend.py) or the simulator's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchmem.allocator.snapshot import NestedStats, SegmentInfo

OomObserver = Callable[[int, int, int, int], None]
"""Called with torch device index, segment-rounded request, device limit or total, driver free (all bytes)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device on which this process already has a context: torch's index, NVML's UUID, name, bytes."""

    index: int
    uuid: str | None
    name: str | None
    total_bytes: int | None


class Backend(Protocol):
    """What the SDK asks of an allocator. No call may create a context.

    Nor may any reset a statistic, synchronise, record or release, save those that are named for it.
    """

    def is_initialized(self) -> bool:
        """Whether CUDA is up in this process; every other call is made only after this said True."""

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call`, which reads this backend and never raises, where it can make no other thread wait.

        For background threads. It runs before this returns, later, or never; once at most.
        """

    def devices(self) -> Sequence[Device]:
        """The devices on which this process already holds a context."""

    def memory_stats(self, device: int) -> NestedStats | None:
        """Nested statistics of one device; None where this allocator keeps none."""

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Segments and blocks of all devices, without traces; None where unsupported or too costly now."""

    def free_bytes(self, device: int) -> int | None:
        """Bytes the driver could still give out on the device (cudaMemGetInfo)."""

    def limit_bytes(self, device: int) -> int | None:
        """The per-process memory limit (memory fraction) in bytes; the device's total when there is none.

        None when it cannot be known.
        """

    def history_enabled(self) -> bool | None:
        """Whether memory history is being recorded, by whomever; None where this allocator cannot record any."""

    def start_history(self, max_entries: int) -> None:
        """Record allocations with their Python stacks, the newest `max_entries` of each device; only when asked to."""

    def stop_history(self) -> None:
        """End the recording and drop what was recorded."""

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:
        """What PyTorch's memory_viz reads, with or without the recorded history; None where that cannot be had."""

    def empty_cache(self) -> None:
        """Return cached segments to the driver; only with the setting `release`. Nothing during a graph capture."""

    def reset_peaks(self, device: int) -> None:
        """Set PyTorch's peaks to the current values, unseen by the user; called only when asked for (`reset_peaks`)."""

    def current_stream(self, device: int) -> int | None:
        """The calling thread's stream on the device, as snapshots number it; None when it is unknown."""

    def allocator_settings(self) -> Mapping[str, str]:
        """The effective settings of the allocator at the newest snapshot, by PyTorch's names."""

    def versions(self) -> Mapping[str, str]:
        """Versions worth showing beside the numbers: torch, cuda, allocator backend."""

    def on_init(self, callback: Callable[[], None]) -> None:
        """Run `callback` once when CUDA comes up (at once when it is up)."""

    def on_step(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Run `callback` in the training thread after every optimizer step, with a number that names the optimizer.

        Returns what removes it.
        """

    def on_oom(self, observer: OomObserver) -> None:
        """Attach `observer` for the life of the process; it runs before OutOfMemoryError is thrown."""
