"""The monitoring behind one session: from `instrument()` to its end, and anew in a forked child."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakMethod

from torchmem.allocator.backend import Backend
from torchmem.sample.sample import Ending
from torchmem.sdk.context import Context
from torchmem.sdk.identity import identify, is_multiprocessing_child
from torchmem.sdk.loop import Loop
from torchmem.sdk.monitor import Build, Monitor
from torchmem.sdk.oom.ending import UncaughtErrors, last_error
from torchmem.sdk.parts import build
from torchmem.sdk.pytorch.idle_backend import IdleBackend
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import shield
from torchmem.sdk.settings import Settings

if TYPE_CHECKING:
    from torchmem.sdk.release.part import ReleasePart


class Lifetime:
    """Starts, forks and ends the monitor.

    `context` and `monitor` are those of this process. `parts` returns what the monitor consists of.
    At the end, what is in `at_close` is called after the last state was published, but not what a
    forked child's parent has put there; errors are counted. Then `on_end` is called.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        environment: Mapping[str, str],
        parts: Build = build,
    ) -> None:
        self.settings = settings
        self.errors = Errors()
        self.has_ended = False
        self.at_close: list[Callable[[], None]] = []
        self.on_end: Callable[[], None] = lambda: None
        self.hooks = PressureHooks(log_later=self.errors.log_later)
        self._backend = backend
        self._environment = environment
        self._parts = parts
        self._uncaught = UncaughtErrors(self.errors)
        self._start()
        self.loop = Loop(self.context, self.monitor)
        self._remove_step_hook = backend.on_step(self.loop.optimizer_stepped)
        try:
            backend.on_init(_without_keeping(self._on_init))
        except BaseException:
            self.has_ended = True
            self._remove_step_hook()
            self._uncaught.remove()
            self.monitor.abandon()
            raise

    def _start(self) -> None:
        """Have a new monitor wait for CUDA in this process."""
        self.context = Context(
            self.settings,
            self._backend,
            self._environment,
            self.errors,
            self.hooks,
            self._uncaught,
        )
        self.monitor = Monitor(self.context, self._parts)
        self._uncaught.follow(self.monitor)

    @property
    def release(self) -> ReleasePart | None:
        """What serves the script's requests for memory, while the monitor runs."""
        return self.context.release if self.monitor.is_running else None

    @shield
    def _on_init(self) -> None:
        started = time.thread_time()
        if not self.has_ended:
            self.monitor.start()
        self.context.cost.add(time.thread_time() - started)

    @property
    def is_explained(self) -> bool:
        """Whether stderr has told why the process has died of an OutOfMemoryError."""
        return self._uncaught.is_explained

    def __str__(self) -> str:
        """Say what is monitored, and where it is published."""
        if isinstance(self._backend, IdleBackend):
            return "inactive"
        process = identify(self.settings, self._environment, {})
        file = self.monitor.file
        place = file.path if file else self.settings.directory(self._environment)
        state = "closed" if self.has_ended else "monitoring" if file else "waiting for CUDA"
        return f"rank {process.rank} of run {process.run!r}, pid {process.pid}, {state}, {place}"

    def rename(self, run: str) -> None:
        """Change the name of the run, unless the setting `run` sets it."""
        with self.errors.suppress("setup"):
            if self.settings.run is None:
                self.settings = replace(self.settings, run=run)
                self.monitor.rename(self.settings)

    def after_fork(self) -> None:
        """Give up the parent's thread, file, and sockets in a forked child.

        The child is monitored as a separate process once it starts CUDA.
        """
        if self.has_ended:
            return
        with self.errors.suppress("setup"):
            self.at_close = []
            parents = self.monitor
            self._start()
            self.loop.follow(self.context, self.monitor)
            parents.close_in_child()

    def at_exit(self) -> None:
        """End at interpreter exit.

        An uncaught exception after an OOM, with no step between them, counts as that OOM. A
        multiprocessing child ends while its exception is still propagating.
        """
        self.context.is_exiting = True
        in_child = is_multiprocessing_child()
        self.end_after(sys.exc_info()[1] if in_child else last_error())

    def end_after(self, error: BaseException | None) -> None:
        """Publish the last state, marked as ended, and stop; `error` is what ends the process."""
        if not self.has_ended:
            self._end(self._uncaught.ending(error))

    @shield
    def _end(self, ending: Ending) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        try:
            with self.errors.suppress("exit"):
                self._uncaught.remove()
                self._remove_step_hook()
                self.monitor.end(ending)
            while self.at_close:
                with self.errors.suppress("exit"):
                    self.at_close.pop()()
            atexit.unregister(self.at_exit)
            self.errors.log_deferred()
        except BaseException:  # from a signal handler; the next call ends what is left
            self.has_ended = False
            raise
        self.on_end()  # not above: what is let go of cannot be ended again


def _without_keeping(method: Callable[[], None]) -> Callable[[], None]:
    """Return a call of the method that does not keep its object: PyTorch keeps it for good."""
    known = WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    return call
