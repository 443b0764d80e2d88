"""The backend without PyTorch, or with monitoring turned off."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

from torchmem.allocator.backend import Backend, OomObserver


class IdleBackend(Backend):
    """A backend on which CUDA never starts.

    A session on it starts no thread and writes no file.
    """

    def call_soon(self, call: Callable[[], None]) -> None:
        """Ignore the call."""

    def stop_history(self) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def call_after_oom(self, call: Callable[[], None]) -> None:
        """Ignore the call."""

    def raise_after(self, error: BaseException, code: CodeType) -> None:
        """Do nothing."""

    def reset_peaks(self, device: int) -> None:
        """Do nothing."""

    def on_init(self, callback: Callable[[], None]) -> None:
        """Never run `callback`."""

    def on_oom(self, observer: OomObserver) -> None:
        """Never run `observer`."""
