"""A backend on which CUDA never comes up: monitoring switched off, or no PyTorch.

`Session`: what `instrument` returns, and where PyTorch's hooks and the process's events arrive.

`instrument()`: the one line in the training script.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchmem.allocator.backend import Backend, Device, OomObserver
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sample.sample import Ending
from torchmem.sdk._errors import Errors
from torchmem.sdk._identity import is_multiprocessing_child
from torchmem.sdk._monitor import Monitor
from torchmem.sdk._peaks import Phase
from torchmem.sdk._settings import Settings, SettingsKeywords, resolve
from torchmem.sdk.steps import Iterations

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


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


class Session:
    """Watches this process's allocator; made by `instrument`, closed by hand, by `with`, or at exit.

    after_step: for tools that run the script; called after every `step`.
    """

    def __init__(
        self, settings: Settings, backend: Backend, environment: Mapping[str, str]
    ) -> None:
        self.settings = settings
        self.errors = Errors()
        self._backend = backend
        self._environment = environment
        self._iterations = Iterations()
        self._explicit_steps = False
        self.after_step: Callable[[], None] | None = None
        self._closed = False
        self._monitor = self._new_monitor()
        self._remove_step_hook = backend.on_step(self._on_step)
        backend.on_init(self._on_init)

    def _new_monitor(self) -> Monitor:
        return Monitor(self.settings, self._backend, self._environment, self.errors)

    @property
    def url(self) -> str | None:
        """Address of this process's own /metrics, when a port was asked for and CUDA is up."""
        return self._monitor.publisher.url if self._monitor.publisher else None

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._closed

    def step(self, samples: int | None = None) -> None:
        """Mark the end of a training step by hand, with the number of samples it consumed.

        From the first call on, steps are counted here and no longer at each optimizer step.
        """
        started = time.thread_time()
        with self.errors.swallow("step"):
            self._explicit_steps = True
            self._monitor.step(samples)
        self._monitor.cost.add(time.thread_time() - started)
        if self.after_step:
            self.after_step()

    def phase(self, name: str) -> Phase:
        """`with session.phase("forward"):` measures the highest allocated bytes within this part of a step.

        A lower bound unless PyTorch's peak moved in the phase; exact with the setting `reset_peaks`. At most 32 names.
        """
        return Phase(self._monitor.phases, name)

    def close(self) -> None:
        """Publish the last state, marked as ended, and stop; harmless when called again."""
        self._close("exited")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._close("oom" if error is not None and self._monitor.oom_pending else "exited")

    def at_exit(self) -> None:
        """Close at interpreter exit: an uncaught exception after an OOM without a later step was that OOM.

        A multiprocessing child catches every exception itself, so there an OOM without a later step is enough.
        """
        uncaught = getattr(sys, "last_value", None) is not None or is_multiprocessing_child()
        self._close("oom" if uncaught and self._monitor.oom_pending else "exited")

    def after_fork(self) -> None:
        """In a forked child: forget thread, file and sockets of the parent; wake again if the child starts CUDA."""
        if self._closed:
            return
        with self.errors.swallow("setup"):
            parents, self._monitor = self._monitor, self._new_monitor()
            if parents.publisher:
                parents.publisher.close_in_child()

    def _on_init(self) -> None:
        started = time.thread_time()
        if not self._closed:
            self._monitor.wake()
        self._monitor.cost.add(time.thread_time() - started)

    def _on_step(self, optimizer: int) -> None:
        started = time.thread_time()
        with self.errors.swallow("step"):
            self._monitor.oom_pending = False
            if not self._explicit_steps and self._iterations.begins(optimizer):
                self._monitor.step(None)
        self._monitor.cost.add(time.thread_time() - started)

    def _close(self, ending: Ending) -> None:
        if self._closed:
            return
        self._closed = True
        with self.errors.swallow("exit"):
            self._remove_step_hook()
            self._monitor.end(ending)


log = logging.getLogger("torchmem")
_lock = threading.Lock()
_current: Session | None = None


def instrument(*, backend: Backend | None = None, **settings: Unpack[SettingsKeywords]) -> Session:
    """Watch this process's GPU memory; call it once, before or after CUDA starts.

    A second call returns the running session. Nothing happens before CUDA is initialised: no thread, no file, no
    CUDA call. Settings are keywords, or `TORCHMEM_*` environment variables; see `torchmem.sdk._settings.Settings`.
    `backend` replaces PyTorch, for simulations and tests.

    Raises UsageError for a misspelt setting and nothing else: without torch, or when anything else goes wrong, the
    session stays idle and one warning is logged.
    """
    resolved = resolve(settings, os.environ)
    global _current  # noqa: PLW0603 - one process, one session
    if _current is None or _current.closed:
        backend = _usable(
            resolved, backend
        )  # before the lock: at the import of torch a tool may come here as well
    with _lock:
        if _current is None or _current.closed:
            _current = _start(resolved, backend)
        elif settings and _current.settings != resolved:
            log.warning("instrument() was called before; its first settings stay in force")
        return _current


def _renew_lock() -> None:
    """In a forked child nobody is left who could release it."""
    global _lock  # noqa: PLW0603 - it is the module's
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _start(settings: Settings, backend: Backend | None) -> Session:
    try:
        session = Session(settings, _usable(settings, backend), os.environ)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the training script
        log.warning(
            "torchmem watches nothing: it could not start (%s: %s)", type(error).__name__, error
        )
        return Session(settings, IdleBackend(), os.environ)
    atexit.register(session.at_exit)
    os.register_at_fork(after_in_child=session.after_fork)
    if is_multiprocessing_child():
        # Such a child leaves by os._exit, which skips atexit.
        import multiprocessing.util

        multiprocessing.util.Finalize(None, session.at_exit, exitpriority=0)
    return session


def _usable(settings: Settings, backend: Backend | None) -> Backend:
    if not settings.enabled:
        return IdleBackend()
    if backend is not None:
        return backend
    try:
        import_module("torch")  # by itself first: whoever waits for it may import `_torch` as well
        from torchmem.sdk.torch_backend import TorchBackend

        return TorchBackend()
    except Exception as error:  # noqa: BLE001 - a broken torch must fail in the user's code, not in ours
        log.warning(
            "torchmem watches nothing: PyTorch cannot be used here (%s: %s)",
            type(error).__name__,
            error,
        )
        return IdleBackend()
