"""A backend on which CUDA never comes up: monitoring switched off, or no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchmem.core.backend import Device, OomObserver
from torchmem.core.snapshot import NestedStats, SegmentInfo


class IdleBackend:
    """Answers every question with "nothing"; a session on it starts no thread and writes no file."""

    def is_initialized(self) -> bool:
        """Never."""
        return False

    def call_soon(self, call: Callable[[], None]) -> None:
        """Never: there is nothing to read."""

    def devices(self) -> Sequence[Device]:
        """None."""
        return ()

    def memory_stats(self, device: int) -> NestedStats | None:  # noqa: ARG002
        """None."""
        return None

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """None."""
        return None

    def free_bytes(self, device: int) -> int | None:  # noqa: ARG002
        """Unknown."""
        return None

    def limit_bytes(self, device: int) -> int | None:  # noqa: ARG002
        """Unknown."""
        return None

    def history_enabled(self) -> bool | None:
        """No history."""
        return None

    def start_history(self, max_entries: int) -> None:
        """Nothing to record."""

    def stop_history(self) -> None:
        """Nothing was recorded."""

    def full_snapshot(self, *, traces: bool) -> Mapping[str, Any] | None:  # noqa: ARG002
        """None."""
        return None

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def reset_peaks(self, device: int) -> None:
        """Nothing to reset."""

    def current_stream(self, device: int) -> int | None:  # noqa: ARG002
        """Unknown."""
        return None

    def allocator_settings(self) -> Mapping[str, str]:
        """None."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """None."""
        return {}

    def on_init(self, callback: Callable[[], None]) -> None:
        """CUDA never comes up."""

    def on_step(self, callback: Callable[[int], None]) -> Callable[[], None]:  # noqa: ARG002
        """No step is ever seen."""
        return lambda: None

    def on_oom(self, observer: OomObserver) -> None:
        """No allocation ever fails."""
