"""`instrument()`, the one line in the training script, and the `Session` that it returns."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmem.allocator.backend import Backend, T
from torchmem.sample.native_threads import Lock
from torchmem.sample.release_tiers import SETTING_TIERS, TIERS
from torchmem.sample.sample import Sample
from torchmem.sdk.identity import is_multiprocessing_child
from torchmem.sdk.iteration import Iteration, batch_shape
from torchmem.sdk.lifetime import Lifetime
from torchmem.sdk.monitor import Build
from torchmem.sdk.parts import build
from torchmem.sdk.pytorch.idle_backend import IdleBackend
from torchmem.sdk.reading.peaks import Phase
from torchmem.sdk.release.pressure_hooks import PressureHook
from torchmem.sdk.safety.errors import log
from torchmem.sdk.safety.interruptions import call_with, is_interruption, shield
from torchmem.sdk.settings import Settings, SettingsKeywords, resolve

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Session:
    """Monitors this process until `close()`, the end of a `with` block, or exit.

    Created by `instrument`. `errors` counts the SDK's own errors. `lifetime` is for the SDK's own
    code. `provisional` is for tools that call `instrument` before the script does: until CUDA is
    initialized, a call with other settings replaces the session. `parts` returns what the monitor
    consists of.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        environment: Mapping[str, str],
        parts: Build = build,
    ) -> None:
        self.lifetime = Lifetime(settings, backend, environment, parts)
        self.errors = self.lifetime.errors
        self.provisional = False

    def __repr__(self) -> str:
        return f"<torchmem.sdk.Session: {self.lifetime}>"

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self.lifetime.settings

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self.lifetime.has_ended

    @property
    def newest(self) -> Sample | None:
        """The newest published sample; None before the first allocation. Reading it is free."""
        return self.lifetime.monitor.newest

    @property
    def url(self) -> str | None:
        """Address of this process's /metrics. None without a port, or before it is published."""
        monitor = self.lifetime.monitor
        return monitor.sample().metrics_url if monitor.is_running and monitor.file else None

    def step(self, samples: int | None = None) -> None:
        """Count a training step and the number of samples that it consumed.

        After the first call, only these calls count as steps; optimizer steps do not.
        """
        self.lifetime.loop.step(samples)

    def iteration(
        self,
        phase: str = "train",
        samples: int | None = None,
        *,
        made_step: Callable[[], bool] | None = None,
        waits: bool = False,
    ) -> Iteration:
        """Mark one pass of a loop: `with session.iteration(samples=32):`.

        The pass is measured as a phase, and `samples` are added to the samples of this process.
        Optimizer steps within it count as usual. With `made_step`, at most one step counts, if an
        optimizer steps or `made_step` returns True at the end. This is for frameworks that call an
        optimizer several times in one step, or do not use torch.optim. The process is not stalled
        while passes begin and end. After a pass with `waits`, such as a server's, the process is
        not stalled until the next pass begins.
        """
        loop = self.lifetime.loop
        iteration = Iteration(self.phase(phase), loop.begin, loop.end)
        iteration.samples, iteration.made_step, iteration.waits = samples, made_step, waits
        return iteration

    def request(self, requests: int = 1) -> Iteration:
        """Mark a server's work on requests: `with session.request():`.

        It counts as one step and `requests` samples, and is measured as the phase generate.
        Afterwards the process waits for the next request, so it is not stalled.
        """
        return self.iteration("generate", requests, made_step=lambda: True, waits=True)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Mark the time that this process waits for others: `with session.idle(): queue.get()`.

        The process does not count as stalled. With the tier `neighbors` of the setting `release`,
        other processes get its cache without delay.
        """
        self.lifetime.context.clock.note_progress(waits=True)
        try:
            yield
        finally:
            self.lifetime.context.clock.note_progress(waits=False)

    def batches(self, batches: Iterable[T], phase: str = "train") -> Iterator[T]:
        """Yield each batch within its own `iteration`, and count its samples in the phase train.

        The number of samples is the length of the first dimension of the batch's first tensor.
        """
        for batch in batches:
            with self.iteration(phase, self._batch_size(batch) if phase == "train" else None):
                yield batch

    def _batch_size(self, batch: object) -> int | None:
        with self.errors.suppress("step"):
            shape = batch_shape(batch)
            plan = self.lifetime.context.plan
            if shape and plan.largest is not None and not plan.is_by_hand:
                plan.batch(prod(shape))
            return shape[0] if shape else None
        return None

    @shield
    def plan(self, largest: float | None) -> None:
        """Set the size of the largest batch that the script plans, to predict its peak memory.

        Use any unit that memory is roughly proportional to, such as tokens with padding. Pass the
        size of each batch to `batch` in the same unit; `batches` uses the number of elements of the
        first tensor. After batches of different sizes, `torchmem_planned_peak_bytes` predicts the
        peak of the largest one. None removes the plan. A value that is not a number above 0 is
        logged and ignored.
        """
        with self.errors.suppress("step"):
            self.lifetime.context.plan.set(largest)

    @shield
    def batch(self, size: float) -> None:
        """Set the size of the next batch, in the unit of `plan`. It must not be a tensor."""
        with self.errors.suppress("step"):
            self.lifetime.context.plan.batch_by_hand(size)

    def rename(self, run: str) -> None:
        """Change the name of the run, unless the setting `run` sets it."""
        self.lifetime.rename(run)

    def phase(self, name: str) -> Phase:
        """Measure the highest allocated bytes in a part of the program.

        Use it as `with session.phase("forward"):`. The result is exact with the setting
        `reset_peaks`. Otherwise it is a lower bound unless PyTorch's peak rose during the phase. At
        most 32 names are measured.
        """
        return Phase(self.lifetime.context.phases, name)

    @shield
    def track(self, name: str, tensors: Any) -> None:
        """Show the memory of these tensors as a separate component called `name`.

        `tensors` is a tensor, a container or an object that contains tensors, a module, or a
        callable that returns one of these. None ends the tracking. Tensors are not kept alive, and
        count only as this component, even if they are parameters. A callable is called repeatedly,
        at the end of steps. At most 25 components are tracked. Never raises: an invalid name is
        logged and ignored.
        """
        with self.errors.suppress("components"):
            self.lifetime.context.components.track(name, tensors)

    def on_pressure(self, callback: Callable[[int], Any], priority: float = 0.0) -> PressureHook:
        """Call `callback` when memory is short, so that the script can free what it does not need.

        The tiers `hooks` and `emergency` of the setting `release` call it, in the training thread:
        at the end of a step, or after an OutOfMemoryError that the script catches. The tier
        `neighbors` calls it for an inference engine of another process that wakes up. `release`
        and `torchmem release --hooks` call it too. It receives the number of bytes wanted, and may
        return the number of bytes freed. Callbacks are called in order of priority, lowest first,
        until enough is free. A callback is dropped with a warning if it raises, takes too long, or
        frees less than half of what it returned three times in a row. To remove it, call `remove()`
        on the result.
        """
        if not any(TIERS[tier].calls_hooks for tier in self.settings.release or {}):
            names = [tier.name for tier in SETTING_TIERS.values() if tier.calls_hooks]
            log(
                logging.WARNING,
                "the setting release names no tier that calls hooks (%s): only session.release() "
                "and `torchmem release --hooks` call a callback of on_pressure()",
                ", ".join(names),
            )
        return self.lifetime.hooks.add(callback, priority)

    def wait_for_memory(
        self,
        nbytes: int,
        timeout: float = 30.0,
        device: int | None = None,
        *,
        take: bool = True,
        borrow: bool = False,
    ) -> bool:
        """Wait until this process can get `nbytes` more, and return whether it can.

        Use it where the script can wait, such as before a phase that needs a lot of memory. With
        the tier `neighbors` of the setting `release`, other processes of this user that have this
        tier return their cache at the end of their step. With `take`, this process takes the memory
        into its own cache at once, in a few large segments, for the current stream. Both the
        driver's free memory and this process's cache count. What sleeping inference engines on the
        device take again when they wake up is left to them, unless this process may `borrow` it:
        then it must return the memory before they wake up. `timeout` is in seconds. `device` is
        torch's index; by default the device on which this process has the most memory. Returns
        False before CUDA is initialized.
        """
        release = self.lifetime.release
        return release is not None and release.wait(
            nbytes, timeout, device, take=take, borrow=borrow
        )

    def release(self, nbytes: int | None = None) -> int:
        """Release memory to the driver now, whatever the setting `release`; return the bytes.

        Use it at the end of a phase, when another process needs the GPU. Calls the callbacks of
        `on_pressure` until they have freed `nbytes` (by default all callbacks), and empties the
        allocator's cache. Raises only interruptions. Returns 0 before CUDA is initialized, and
        while a CUDA graph is being captured.
        """
        release = self.lifetime.release
        return release.by_script(nbytes) if release else 0

    def suspend_communicators(self, groups: Collection[str] | None = None) -> int:
        """Give back what NCCL's communicators can spare while nothing uses them; return the bytes.

        For phases without collectives, such as the rollout of RL. It is a collective itself: every
        rank must call it with the same `groups` (descriptions or names; by default all of NCCL),
        and `resume_communicators` before the next collective. Waits for the device. Counted as the
        tier `communicators`. Needs PyTorch 2.12 and NCCL 2.29.7: without them, it logs that and
        returns 0. Raises RuntimeError if NCCL fails.
        """
        release = self.lifetime.release
        return release.suspend_communicators(groups) if release else 0

    def resume_communicators(self, groups: Collection[str] | None = None) -> int:
        """Take back what `suspend_communicators` gave, on every rank; return the bytes.

        If the driver has less free, PyTorch's cache is emptied first.
        """
        release = self.lifetime.release
        return release.resume_communicators(groups) if release else 0

    def close(self) -> None:
        """Publish the last state, marked as ended, and stop. Calling it again has no effect.

        If an exception is being handled, it counts as the reason.
        """
        self.lifetime.end_after(sys.exc_info()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.lifetime.end_after(error)


class NewestSample(NamedTuple):
    """What a process published last, and its run directory.

    `is_explained` is whether stderr has told why the process has died of an OutOfMemoryError.
    """

    sample: Sample
    directory: Path
    is_explained: bool


_lock = Lock()
_current: Session | None = None
_ended: NewestSample | None = None


def instrument(*, backend: Backend | None = None, **settings: Unpack[SettingsKeywords]) -> Session:
    """Monitor this process's GPU memory. Call it once, before or after CUDA starts.

    A second call returns the running session. Before CUDA is initialized, no thread is started, and
    CUDA is not called. Before GPU memory is allocated or a step ends, no file is written. Settings
    are keywords or `TORCHMEM_*` environment variables; see `torchmem.sdk.settings.Settings`.
    `backend` replaces PyTorch, for simulations and tests.

    Raises UsageError for a misspelled keyword or its invalid value, and nothing else. Without
    PyTorch, or if anything else fails, the session is idle and one warning is logged.
    """
    resolved = resolve(settings, os.environ)
    if _current is None or _current.closed:
        # Before the lock: the import of torch may run a tool that calls instrument() too.
        backend = _usable_backend(resolved, backend)
    session = call_with(_lock, lambda: _session(resolved, backend, is_default=not settings))
    session.errors.log_deferred()  # without the lock: a handler may wait, or call instrument()
    return session


def _session(resolved: Settings, backend: Backend | None, *, is_default: bool) -> Session:
    """Return the running session, or a new one; with the lock held."""
    global _current  # noqa: PLW0603 - one process, one session
    is_other = bool(not is_default and _current and _current.settings != resolved)
    if _current and is_other and _is_replaceable(_current):
        _current.close()  # _current is None then
    if _current is None or _current.closed:
        _current = _start(resolved, backend)
        _current.lifetime.on_end = partial(_forget, _current)
    elif is_other:
        _current.errors.log_later(
            logging.WARNING,
            "instrument() was called before; the settings of the first call stay in effect",
        )
    return _current


def _is_replaceable(session: Session) -> bool:
    """Return whether the session is provisional and has not published anything yet."""
    return session.provisional and not session.lifetime.monitor.is_active


def current_session() -> Session | None:
    """Return this process's running session, or None."""
    return _current


def newest_sample() -> NewestSample | None:
    """Return what this process published last, also by a session that has ended.

    None if nothing was published.
    """
    return (_current and _published(_current)) or _ended


def _published(session: Session) -> NewestSample | None:
    newest, lifetime = session.newest, session.lifetime
    if newest is None:
        return None
    return NewestSample(newest, session.settings.directory(os.environ), lifetime.is_explained)


def _forget(session: Session) -> None:
    """Let go of a session that has ended."""
    global _current, _ended
    if session is _current:
        _current, _ended = None, _published(session) or _ended


def _after_fork() -> None:
    """Give a forked child a session of its own, and a lock, which no thread can release there."""
    global _lock, _ended
    _lock, _ended = Lock(), None
    if _current is not None:
        _current.lifetime.after_fork()


# Once for all sessions: it cannot be taken back.
os.register_at_fork(after_in_child=_after_fork)


def _start(settings: Settings, backend: Backend | None) -> Session:
    try:
        session = Session(settings, _usable_backend(settings, backend), os.environ)
        description = str(session.lifetime)
    except Exception as error:
        if is_interruption(error):
            raise
        return _inactive(settings, f"starting it failed ({type(error).__name__}: {error})")
    session.errors.log_later(logging.INFO, "torchmem: %s", description)
    atexit.register(session.lifetime.at_exit)
    # Multiprocessing children exit by os._exit, which skips atexit. torch imports this module.
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        multiprocessing.register_after_fork(session, _end_with_child)
    if is_multiprocessing_child():
        _end_with_child(session)
    return session


def _inactive(settings: Settings, reason: str) -> Session:
    session = Session(settings, IdleBackend(), os.environ)
    session.errors.log_later(logging.WARNING, "torchmem is inactive: %s", reason)
    return session


def _end_with_child(_: Session) -> None:
    """End the session when the multiprocessing child that calls this ends."""
    import multiprocessing.util

    multiprocessing.util.Finalize(None, _end_at_exit, exitpriority=0)


def _end_at_exit() -> None:
    if _current is not None:
        _current.lifetime.at_exit()


def _usable_backend(settings: Settings, backend: Backend | None) -> Backend:
    if not settings.enabled:
        return IdleBackend()
    if backend is not None:
        return backend
    try:
        # Imported by itself first: other code that waits for it may import `pytorch.backend`.
        import_module("torch")
        from torchmem.sdk.pytorch.backend import TorchBackend

        return TorchBackend()
    except Exception as error:  # a broken torch must fail in the script, not here
        if is_interruption(error):
            raise
        log(
            logging.WARNING,
            "torchmem is inactive: PyTorch cannot be used here (%s: %s)",
            type(error).__name__,
            error,
        )
        return IdleBackend()
