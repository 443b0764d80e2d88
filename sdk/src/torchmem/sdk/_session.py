"""`Session`: what `instrument` returns, and where PyTorch's hooks and the process's events arrive."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from torchmem.core.backend import Backend
from torchmem.core.sample import Ending
from torchmem.sdk._errors import Errors
from torchmem.sdk._identity import is_multiprocessing_child
from torchmem.sdk._monitor import Monitor
from torchmem.sdk._phases import Phase
from torchmem.sdk._settings import Settings
from torchmem.sdk._steps import Iterations

if TYPE_CHECKING:
    from typing_extensions import Self


class Session:
    """Watches this process's allocator; made by `instrument`, closed by hand, by `with`, or at exit.

    after_step: for tools that run the script; called after every `step`.
    """

    def __init__(self, settings: Settings, backend: Backend, environment: Mapping[str, str]) -> None:
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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
