"""The backend without PyTorch, or with monitoring turned off: CUDA never starts on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torchmem.allocator.backend import Device, HeldBlock, OomObserver, T, TraceEntry
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sample.sample import PinnedMemory


class IdleBackend:
    """A backend on which CUDA never starts.

    A session on it starts no thread and writes no file.
    """

    def is_initialized(self) -> bool:
        """Return False."""
        return False

    def call_soon(self, call: Callable[[], None]) -> None:
        """Ignore the call."""

    def devices(self) -> Sequence[Device]:
        """Return no devices."""
        return ()

    def memory_stats(self, device: int) -> NestedStats | None:  # noqa: ARG002
        """Return None."""
        return None

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return None."""
        return None

    def free_bytes(self, device: int) -> int | None:  # noqa: ARG002
        """Return None."""
        return None

    def pinned_memory(self) -> PinnedMemory | None:
        """Return None."""
        return None

    def limit_bytes(self, device: int) -> int | None:  # noqa: ARG002
        """Return None."""
        return None

    def world(self) -> tuple[int, int] | None:
        """Return None."""
        return None

    def history_enabled(self) -> bool | None:
        """Return None."""
        return None

    def owns_history(self) -> bool:
        """Return False."""
        return False

    def start_history(self, max_entries: int) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def stop_history(self) -> None:
        """Do nothing."""

    def start_stacks(self) -> bool:
        """Return False."""
        return False

    def start_trace(self, max_entries: int, *, complete: bool = False) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def end_trace(self, use: Callable[[Sequence[Sequence[TraceEntry]]], T]) -> T | None:  # noqa: ARG002
        """Return None."""
        return None

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:  # noqa: ARG002
        """Return None."""
        return None

    def empty_cache(self) -> None:
        """Do nothing."""

    def hold(self, blocks: Sequence[HeldBlock]) -> AbstractContextManager[int]:  # noqa: ARG002
        """Hold nothing."""
        return nullcontext(0)

    def is_capturing(self) -> bool:
        """Return False."""
        return False

    def collect_above(self, shares: Mapping[int, float]) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def call_after_oom(self, call: Callable[[], None]) -> None:
        """Ignore the call."""

    def reset_peaks(self, device: int) -> None:
        """Do nothing."""

    def backward_node(self) -> str | None:
        """Return None."""
        return None

    def is_training(self) -> bool:
        """Return False."""
        return False

    def current_stream(self, device: int) -> int | None:  # noqa: ARG002
        """Return None."""
        return None

    def allocator_settings(self) -> Mapping[str, str]:
        """Return no settings."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Return no versions."""
        return {}

    def on_init(self, callback: Callable[[], None]) -> None:
        """Never run `callback`."""

    def python_tensors(self, device: int) -> None:
        """Return None."""

    def modules(self) -> None:
        """Return None."""

    def tensor_counter(self) -> None:
        """Return None."""

    def on_step_begin(
        self,
        callback: Callable[[object, bool], None],  # noqa: ARG002
    ) -> Callable[[], None]:
        """Never run `callback`."""
        return lambda: None

    def on_step(self, callback: Callable[[object], None]) -> Callable[[], None]:  # noqa: ARG002
        """Never run `callback`."""
        return lambda: None

    def on_oom(self, observer: OomObserver) -> None:
        """Never run `observer`."""
