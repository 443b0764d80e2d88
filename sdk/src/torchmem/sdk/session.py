"""`instrument()`, the one line in the training script, and the `Session` that it returns."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

from torchmem.allocator.backend import Backend, T
from torchmem.sample.native_threads import Lock
from torchmem.sample.release_tiers import SETTING_TIERS, TIERS
from torchmem.sample.sample import Ending, Sample
from torchmem.sdk.context import Context
from torchmem.sdk.engine import EnginePart, EngineSource, failed_wake_up
from torchmem.sdk.identity import identify, is_multiprocessing_child
from torchmem.sdk.iteration import Iteration, batch_shape
from torchmem.sdk.monitor import Build, Monitor
from torchmem.sdk.oom.ending import UncaughtErrors, ending_of, is_oom, last_error, library_oom
from torchmem.sdk.publish.optional import OwnPort
from torchmem.sdk.pytorch.idle_backend import IdleBackend
from torchmem.sdk.reading.peaks import Phase
from torchmem.sdk.release.pressure_hooks import PressureHook, PressureHooks
from torchmem.sdk.safety.cost import MAX_STEP_SECONDS
from torchmem.sdk.safety.errors import Errors, log
from torchmem.sdk.safety.interruptions import is_interruption, shield
from torchmem.sdk.settings import Settings, SettingsKeywords, resolve
from torchmem.sdk.steps import Iterations

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from torchmem.sdk.part import Part
    from torchmem.sdk.release.part import ReleasePart


def build_parts(context: Context, monitor: Monitor) -> Iterable[Part]:
    """Return all parts. They are imported only once CUDA starts, as scripts wait for an import."""
    from torchmem.sdk.parts import build

    return build(context, monitor)


def _without_keeping(method: Callable[[], None]) -> Callable[[], None]:
    """Return a call of the method that does not keep its object: PyTorch keeps it for good."""
    known = WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    return call


class Session:
    """Monitors this process's allocator until `close()`, the end of a `with` block, or exit.

    Created by `instrument`. `errors` counts the SDK's own errors. `after_step` is for tools that
    run the script: it is called after every `step`. `provisional` is for tools that call
    `instrument` before the script does: until CUDA is initialized, a call with other settings
    replaces the session. `parts` returns what the monitor consists of.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        environment: Mapping[str, str],
        parts: Build = build_parts,
    ) -> None:
        self.settings = settings
        self.errors = Errors()
        self.after_step: Callable[[], None] | None = None
        self.provisional = False
        self._backend = backend
        self._environment = environment
        self._iterations = Iterations()
        # When an optimizer last stepped in an iteration that another one had begun.
        self._joined = 0.0
        self._explicit_steps = False
        # Weak: if training fails, a framework's callback never ends its pass.
        self._open: list[ref[Iteration]] = []
        self._closers: list[Callable[[], None]] = []
        self._closed = False
        self._ending: Ending | None = None
        self._uncaught = UncaughtErrors(self._on_uncaught)
        self._hooks = PressureHooks(log_later=self.errors.log_later)
        self._parts = parts
        self._context = self._new_context()
        self._cost, self._clock = self._context.cost, self._context.clock
        self._monitor = Monitor(self._context, parts)
        self._remove_step_hook = backend.on_step(self._on_step)
        try:
            backend.on_init(_without_keeping(self._on_init))
        except BaseException:
            self._closed = True
            self._remove_step_hook()
            self._uncaught.remove()
            self._monitor.abandon()
            raise

    def _new_context(self) -> Context:
        return Context(
            self.settings,
            self._backend,
            self._environment,
            self.errors,
            self._hooks,
            self._uncaught,
        )

    def __repr__(self) -> str:
        return f"<torchmem.sdk.Session: {self.description()}>"

    def description(self) -> str:
        """Describe what the session monitors and where it publishes."""
        if isinstance(self._backend, IdleBackend):
            return "inactive"
        process = identify(self.settings, self._environment, {})
        file = self._monitor.file
        place = file.path if file else self.settings.directory(self._environment)
        state = "closed" if self._closed else "monitoring" if file else "waiting for CUDA"
        return f"rank {process.rank} of run {process.run!r}, pid {process.pid}, {state}, {place}"

    @property
    def url(self) -> str | None:
        """Address of this process's /metrics. None without a port, or before it is published."""
        port = self._monitor.part(OwnPort)
        return port.url if port else None

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._closed

    @property
    def replaceable(self) -> bool:
        """Whether the session is provisional and has not published anything yet."""
        return self.provisional and not self._monitor.is_active

    def step(self, samples: int | None = None) -> None:
        """Count a training step and the number of samples that it consumed.

        After the first call, only these calls count as steps; optimizer steps do not.
        """
        self._step_by_hand(samples)
        if self.after_step:
            self.after_step()

    @shield
    def _step_by_hand(self, samples: int | None) -> None:
        self._explicit_steps = True
        self._count_step(perf_counter(), samples)

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
        iteration = Iteration(self.phase(phase), self._begin_iteration, self._end_iteration)
        iteration.samples, iteration.made_step, iteration.waits = samples, made_step, waits
        return iteration

    def request(self, requests: int = 1) -> Iteration:
        """Mark a server's work on requests: `with session.request():`.

        It counts as one step and `requests` samples, and is measured as the phase generate.
        Afterwards the process waits for the next request, so it is not stalled.
        """
        return self.iteration("generate", requests, made_step=lambda: True, waits=True)

    @shield
    def serve(self, engine: EngineSource) -> None:
        """Publish the memory of an inference engine in this process.

        For integrations of engines. Call `engine_changed` when the engine has allocated memory,
        `engine_ready` after its warm-up, and wrap what gives memory back to the driver and takes it
        again in `engine_moves`.
        """
        self._context.engine.source = engine

    @shield
    def engine_changed(self) -> None:
        """Read what the engine holds now, and publish it."""
        self._read_engine(None)

    @shield
    def engine_ready(self) -> None:
        """Note that the engine's warm-up has ended: peaks count from now on.

        If the engine is alone in this process, PyTorch's peaks are reset once; `torch.cuda` and
        `torch.accelerator` still show the script the values since its own latest reset.
        """
        part = self._monitor.part(EnginePart)
        self._read_engine(None if part is None else part.ready)

    def engine_wakes(self, parts: Iterable[str] | None = None, timeout: float = 30.0) -> None:
        """Make room for the engine, or for some of its parts, before it wakes up.

        If the driver has too little free memory, the callbacks of `on_pressure` are called and the
        cache is emptied. With the tier `neighbors` of the setting `release`, other processes of
        this user are asked too, for at most `timeout` seconds.
        """
        engine, release = self._context.engine, self._release_part()
        engine.waking = None if parts is None else frozenset(parts)
        if release is not None and engine.device is not None and engine.asleep_bytes:
            release.make_room(engine.asleep_of(parts), timeout, engine.device)

    @contextmanager
    def engine_moves(self, *, sleeps: bool = False) -> Iterator[None]:
        """Mark a call in which the engine gives memory back to the driver or takes it again.

        `sleeps`: it goes to sleep. Nothing is released meanwhile, and what is left is published
        afterwards, also if the call fails.
        """
        state = self._context.engine
        state.is_moving = True
        try:
            yield
        except Exception as error:
            self._on_engine_error(error, wakes=not sleeps)
            raise
        finally:
            state.is_moving = False
            part = self._monitor.part(EnginePart)
            self._read_engine(part.slept if part and sleeps else None)

    @shield
    def _on_engine_error(self, error: BaseException, *, wakes: bool) -> None:
        """Count an OOM of the engine's own allocator, which the engine may survive."""
        with self.errors.suppress("exit"):
            oom = library_oom(error)
            part = self._monitor.part(EnginePart)
            if oom is not None and wakes and part is not None:
                part.changed()
                oom = failed_wake_up(oom, self._context.engine)
            if oom is not None:
                self._monitor.on_library_oom(oom)

    @shield
    def _read_engine(self, after: Callable[[], None] | None) -> None:
        with self.errors.suppress("engine"):
            part = self._monitor.part(EnginePart)
            if part is not None:
                part.changed()
            self._monitor.read_here(after)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Mark the time that this process waits for others: `with session.idle(): queue.get()`.

        The process does not count as stalled. With the tier `neighbors` of the setting `release`,
        other processes get its cache without delay.
        """
        self._context.clock.note_progress(waits=True)
        try:
            yield
        finally:
            self._context.clock.note_progress(waits=False)

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
            plan = self._context.plan
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
            self._context.plan.set(largest)

    @shield
    def batch(self, size: float) -> None:
        """Set the size of the next batch, in the unit of `plan`. It must not be a tensor."""
        with self.errors.suppress("step"):
            self._context.plan.batch_by_hand(size)

    def rename(self, run: str) -> None:
        """Change the name of the run, unless the setting `run` sets it."""
        with self.errors.suppress("setup"):
            if self.settings.run is None:
                self.settings = replace(self.settings, run=run)
                self._monitor.rename(self.settings)

    @shield
    def _begin_iteration(self, iteration: Iteration) -> None:
        self._open.append(ref(iteration))
        self._context.clock.note_progress(waits=False)

    @shield
    def _end_iteration(self, iteration: Iteration, samples: int | None) -> None:
        self._open = [other for other in self._open if other() not in {iteration, None}]
        has_stepped = False
        with self.errors.suppress("step"):
            self._context.clock.note_progress(waits=iteration.waits)
            if samples:
                self._context.clock.add_samples(samples)
            has_stepped = bool(iteration.made_step and iteration.made_step())
        if has_stepped and not iteration.has_counted and not self._explicit_steps:
            self._count_step(perf_counter(), None)
            if self.after_step:
                self.after_step()

    def phase(self, name: str) -> Phase:
        """Measure the highest allocated bytes in a part of the program.

        Use it as `with session.phase("forward"):`. The result is exact with the setting
        `reset_peaks`. Otherwise it is a lower bound unless PyTorch's peak rose during the phase. At
        most 32 names are measured.
        """
        return Phase(self._context.phases, name)

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
            self._context.components.track(name, tensors)

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
        return self._hooks.add(callback, priority)

    @property
    def newest(self) -> Sample | None:
        """The newest published sample; None before the first allocation. Reading it is free."""
        return self._monitor.newest

    def at_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the session ends, after its last state is published.

        Exceptions that it raises are counted. A forked child does not call it.
        """
        self._closers.append(callback)

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
        release = self._release_part()
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
        release = self._release_part()
        return release.by_script(nbytes) if release else 0

    def _release_part(self) -> ReleasePart | None:
        if not self._monitor.is_active:
            return None
        from torchmem.sdk.release.part import ReleasePart

        return self._monitor.part(ReleasePart)

    def close(self) -> None:
        """Publish the last state, marked as ended, and stop. Calling it again has no effect.

        If an exception is being handled, it counts as the reason.
        """
        self._close_after(sys.exc_info()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._close_after(error)

    def at_exit(self) -> None:
        """Close at interpreter exit.

        An uncaught exception after an OOM, with no step between them, counts as that OOM. A
        multiprocessing child closes while its exception is still propagating.
        """
        self._context.is_exiting = True
        in_child = is_multiprocessing_child()
        self._close_after(sys.exc_info()[1] if in_child else last_error())

    def _close_after(self, error: BaseException | None) -> None:
        if self._closed:
            return
        with self.errors.suppress("exit"):
            if self._ending is None and error is not None:
                self._on_uncaught(error, ends_process=True)
        by_exit = self._uncaught.exit_ending(oom_pending=self._monitor.oom_pending)
        self._close(self._ending or by_exit)

    def _on_uncaught(self, error: BaseException, ends_process: bool) -> None:
        """Count a library's uncaught OOM, and keep how it ends the process."""
        with self.errors.suppress("exit"):
            oom = None if self._closed else library_oom(error)
            if oom is not None:
                self._monitor.on_library_oom(oom)
            if ends_process and not self._closed and (oom is not None or is_oom(error)):
                self._add_tensors()
            if ends_process and not hasattr(sys, "ps1"):
                self._ending = ending_of(error, oom_pending=self._monitor.oom_pending)

    def _add_tensors(self) -> None:
        if self._monitor.is_active:
            from torchmem.sdk.oom.reports import OomReports

            reports = self._monitor.part(OomReports)
            if reports:
                reports.add_tensors()

    def after_fork(self) -> None:
        """Give up the parent's thread, file, and sockets in a forked child.

        The child is monitored as a separate process once it starts CUDA.
        """
        if self._closed:
            return
        with self.errors.suppress("setup"):
            self._open, self._closers = [], []
            parents, self._context = self._monitor, self._new_context()
            self._cost, self._clock = self._context.cost, self._context.clock
            self._iterations = Iterations()
            self._monitor = Monitor(self._context, self._parts)
            parents.close_in_child()

    @shield
    def _on_init(self) -> None:
        started = time.thread_time()
        if not self._closed:
            self._monitor.start()
        self._context.cost.add(time.thread_time() - started)

    @shield
    def _on_step(self, optimizer: object) -> None:
        """Count a training step if this step of an optimizer shows that one began."""
        now = perf_counter()
        self._monitor.oom_pending = False
        self._context.components.see(optimizer)
        if self._explicit_steps:
            return
        begun = self._begun(optimizer)
        if begun == 0:
            self._joined = now
            return
        if begun > 1:
            self._clock.tick(self._joined)
        self._count_step(now, None)

    def _begun(self, optimizer: object) -> int:
        """Return the number of steps to count at this step of an optimizer."""
        passes = [each() for each in reversed(self._open)] if self._open else ()
        iteration = next((each for each in passes if each and each.made_step), None)
        if iteration is None:
            return self._iterations.begun(optimizer)
        begins, iteration.has_counted = not iteration.has_counted, True
        return int(begins)

    def _count_step(self, now: float, samples: int | None) -> None:
        """Call the monitor at the end of a step, and count what this cost."""
        try:
            self._monitor.step(now, samples)
        except Exception as error:
            if self.errors.passes("step", error):
                raise
        self._cost.step_seconds += min(MAX_STEP_SECONDS, perf_counter() - now)

    @shield
    def _close(self, ending: Ending) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with self.errors.suppress("exit"):
                self._uncaught.remove()
                self._remove_step_hook()
                self._monitor.end(ending)
            while self._closers:
                with self.errors.suppress("exit"):
                    self._closers.pop()()
            atexit.unregister(self.at_exit)
            self.errors.log_deferred()
            _forget(self)
        except BaseException:  # from a signal handler; the next call ends what is left
            self._closed = False
            raise


_lock = Lock()
_current: Session | None = None
_ended: tuple[Sample, Path] | None = None


def instrument(*, backend: Backend | None = None, **settings: Unpack[SettingsKeywords]) -> Session:
    """Monitor this process's GPU memory. Call it once, before or after CUDA starts.

    A second call returns the running session. Before CUDA is initialized, no thread is started, and
    CUDA is not called. Before GPU memory is allocated or a step ends, no file is written. Settings
    are keywords or `TORCHMEM_*` environment variables; see `torchmem.sdk.settings.Settings`.
    `backend` replaces PyTorch, for simulations and tests.

    Raises UsageError for a misspelled setting or an invalid value, and nothing else. Without
    PyTorch, or if anything else fails, the session is idle and one warning is logged.
    """
    resolved = resolve(settings, os.environ)
    global _current  # noqa: PLW0603 - one process, one session
    if _current is None or _current.closed:
        # Before the lock: the import of torch may run a tool that calls instrument() too.
        backend = _usable_backend(resolved, backend)
    with _lock.native:
        is_other = bool(settings and _current and _current.settings != resolved)
        if _current and is_other and _current.replaceable:
            _current.close()  # _current is None then
        if _current is None or _current.closed:
            _current = _start(resolved, backend)
        elif is_other:
            _current.errors.log_later(
                logging.WARNING,
                "instrument() was called before; the settings of the first call stay in effect",
            )
        session = _current
    session.errors.log_deferred()  # without the lock: a handler may wait, or call instrument()
    return session


def current_session() -> Session | None:
    """Return this process's running session, or None."""
    return _current


def newest_sample() -> tuple[Sample, Path] | None:
    """Return what this process published last, also by a session that has ended.

    With it comes the run directory. None if nothing was published.
    """
    return (_current and _published(_current)) or _ended


def _published(session: Session) -> tuple[Sample, Path] | None:
    newest = session.newest
    return (newest, session.settings.directory(os.environ)) if newest else None


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
        _current.after_fork()


# Once for all sessions: it cannot be taken back.
os.register_at_fork(after_in_child=_after_fork)


def _start(settings: Settings, backend: Backend | None) -> Session:
    try:
        session = Session(settings, _usable_backend(settings, backend), os.environ)
        description = session.description()
    except Exception as error:
        if is_interruption(error):
            raise
        return _inactive(settings, f"starting it failed ({type(error).__name__}: {error})")
    session.errors.log_later(logging.INFO, "torchmem: %s", description)
    atexit.register(session.at_exit)
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
        _current.at_exit()


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
