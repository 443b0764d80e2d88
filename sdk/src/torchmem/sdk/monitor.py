"""`Monitor`: follows one process's allocator from CUDA's initialization to the end of the process.

It reads, publishes, and calls a list of parts, without knowing any of them.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import ref

from torchmem.allocator.backend import OomObserver
from torchmem.allocator.settings import ignored_settings
from torchmem.explain.activity import trains
from torchmem.explain.call_stack import Origin
from torchmem.explain.verdict import Circumstances
from torchmem.sample.native_threads import Lock
from torchmem.sample.sample import Ending, Process, Sample, SelfCost, possible
from torchmem.sdk.context import Context
from torchmem.sdk.draft import Draft
from torchmem.sdk.identity import identify, is_compile_process, placed
from torchmem.sdk.observation import FailedAllocation, MeasuredSnapshot, Oom, OomObservation
from torchmem.sdk.oom.ending import LibraryOom
from torchmem.sdk.part import Part, Parts, StepAction
from torchmem.sdk.publish.sample_file import SampleFile
from torchmem.sdk.pytorch.call_stack import calling_origin
from torchmem.sdk.reading.reader import Reader
from torchmem.sdk.reading.run_history import next_early_step
from torchmem.sdk.safety.cost import FIRST_STEPS, MAX_STEP_SECONDS
from torchmem.sdk.safety.interruptions import call_holding, call_if_free, shield
from torchmem.sdk.safety.sigterm import SigtermFlush
from torchmem.sdk.sampler import Sampler
from torchmem.sdk.settings import Settings

JOIN_SECONDS = 0.5
LOCK_SECONDS = 1.0

Build = Callable[[Context, "Monitor"], Iterable[Part]]
"""Returns the parts of a monitor whose `process` and `file` are known."""


class Monitor:
    """The monitoring of one process; a forked child gets its own.

    Until `start` there is no thread and no file, and nothing is measured. No method lets an error
    of the SDK escape. `oom_pending` is True if no step has ended since the newest OOM, and
    `is_step_watched` if statistics are read before and after the next optimizer step.
    `on_snapshot` is called with each snapshot that was measured, in the background thread, and
    `on_early_read` after a read of only the allocated bytes, at a step's end.
    """

    # `start` sets them.
    file: SampleFile | None = None
    _process: Process | None = None
    _observer: OomObserver | None = None

    def __init__(self, context: Context, build: Build) -> None:
        self.oom_pending = False
        self.is_step_watched = False
        self.on_snapshot: Callable[[MeasuredSnapshot], None] = lambda _: None
        self.on_early_read: Callable[[int], None] = lambda _: None
        self._is_rank = False
        # The step from which its end may have more to do than to count, if no read is due before.
        self._due_step: float = 0
        self._next_early = 1
        self._context = context
        self._build = build
        self._settings = context.settings
        self._backend = context.backend
        self._errors = context.errors
        self._cost = context.cost
        self._clock = context.clock
        self._recorder = context.recorder
        self._components = context.components
        self.reader = Reader(
            self._recorder, self._settings, self._errors, self._cost, self._after_read
        )
        self._sampler = Sampler(self._tick, self._settings.interval, self._cost)
        self._sigterm = SigtermFlush(self._publish_in_handler)
        self._parts = Parts()
        self._to_begin: deque[Part] = deque()
        self._to_start = deque((self._open, self._start_sampler, self._begin, self._watch_ooms))
        self._starting = Lock()
        self._publishing = Lock()
        self._pid: int | None = None
        self._ended: Ending | None = None
        self._unwatch: Callable[[], None] | None = None

    @property
    def is_active(self) -> bool:
        """Whether the monitor was started in this process."""
        return self._pid == os.getpid()

    @property
    def process(self) -> Process:
        """The identity of the process; only after `start`."""
        assert self._process is not None  # noqa: S101 - set before anything that publishes
        return self._process

    @property
    def path(self) -> Path:
        """The path of the sample file; only after `start`."""
        assert self.file is not None  # noqa: S101 - likewise
        return self.file.path

    @property
    def is_rank(self) -> bool:
        """Whether the process has allocated GPU memory or worked on a step, or tried to.

        Helpers such as loaders, agents and launchers may initialize CUDA, too, and inherit the
        rank of the process that they help. Nothing is published of them.
        """
        if not self._is_rank:
            self._is_rank = self._clock.has_begun or self._recorder.has_allocated
        return self._is_rank

    @property
    def is_dying(self) -> bool:
        """Whether the process may die of the newest OOM, or has."""
        return self.oom_pending and self._ended != "exited"

    @property
    def has_ended(self) -> bool:
        """Whether the last state is being published, or was."""
        return self._ended is not None

    @property
    def is_running(self) -> bool:
        """Whether the monitor was started in this process and has not ended."""
        return self.is_active and not self._ended

    def start(self) -> None:
        """Attach the OOM observer and start to publish, once CUDA is up in this process.

        An exception that interrupts it leaves the rest to the next call, that is, to the next step.
        """
        if not self._to_start or self._ended or self._pid not in {None, os.getpid()}:
            return
        if is_compile_process():
            return
        self._pid = os.getpid()
        call_if_free(self._starting, self._start)

    def _start(self) -> None:
        while self._to_start:
            self._to_start[0]()
            self._to_start.popleft()

    def _open(self) -> None:
        context = self._context
        with self._errors.suppress("setup"):
            self._process = identify(self._settings, context.environment, self._backend.versions())
            directory = self._settings.directory(context.environment)
            self.file = SampleFile.of(self._process, directory, self._errors)
            parts = tuple(self._build(context, self))
            self._to_begin = deque(parts)
            self._parts = Parts(parts)

    def _start_sampler(self) -> None:
        with self._errors.suppress("setup"):
            if self.file:
                self._sigterm.install()
                self._sampler.start()

    def _begin(self) -> None:
        while self._to_begin:
            part = self._to_begin[0]
            with self._errors.suppress(part.stage):
                part.begin()
            self._to_begin.popleft()

    def _watch_ooms(self) -> None:
        """Attach an observer; an observer left by an interrupted start does nothing.

        PyTorch keeps it for good, so it does not keep the monitor.
        """
        monitor = ref(self)

        def observe(device: int, requested: int, limit: int, driver_free: int) -> None:
            own = monitor()
            if own is not None and own._observer is observe:  # noqa: SLF001 - its own class
                own._on_oom(device, requested, limit, driver_free)  # noqa: SLF001

        with self._errors.suppress("oom"):
            self._observer = observe
            self._backend.on_oom(observe)

    def _publish_in_handler(self) -> None:
        """Publish in a signal handler, which forked children inherit."""
        if self.is_active:
            self.publish()

    def step(self, now: float, samples: int | None) -> None:
        """Count a training step that ends at `now`, by `time.perf_counter`, in its thread.

        Most steps end here: no read is due, and no part has anything to do.
        """
        self._clock.tick(now, samples)
        self.oom_pending = False
        if now >= self.reader.next_read or self._clock.count >= self._due_step:
            self._act(now)

    def _act(self, now: float) -> None:
        """Call the parts that are due, and read if a read is due."""
        if self._ended or not self._backend.is_initialized():
            return
        count = self._clock.count
        actions = self._call_at_step(self._parts.due(count))
        is_first = count <= FIRST_STEPS and self._components.has_optimizers
        is_routine = is_first or "watch" in actions or now >= self.reader.next_read
        if is_routine or self.is_step_watched or "read" in actions:
            self._read_at_step(now, watch_next=is_routine)
        elif count >= self._next_early:
            self._read_early(count)
        if count >= self._next_early:
            self._next_early = next_early_step(count)
        is_next_due = self.is_step_watched
        self._due_step = 0 if is_next_due else min(self._parts.due_step, self._next_early)

    def _read_early(self, count: int) -> None:
        started = time.thread_time()
        self.reader.early(count)
        self.on_early_read(count)
        # The loop counts the first MAX_STEP_SECONDS of every step.
        self._cost.add(max(0.0, time.thread_time() - started - MAX_STEP_SECONDS))

    def _call_at_step(self, parts: Collection[Part]) -> set[StepAction | None]:
        """Let the parts act; return the reads that they want."""
        actions: set[StepAction | None] = set()
        if parts:
            started = time.thread_time()
            self._call_each(parts, lambda part: actions.add(part.at_step()))
            self._cost.add(time.thread_time() - started)
        return actions

    def _read_at_step(self, now: float, *, watch_next: bool) -> None:
        started = time.thread_time()
        self._watch(is_watched=False)
        self.start()
        self.reader.at_step(self._clock.count, now)
        if any(record.components for record in self._recorder.records().values()):
            self._clock.read_count = self._clock.count
        if watch_next:
            self._watch_next_step()
        self._cost.add(time.thread_time() - started)

    def _watch_next_step(self) -> None:
        """Read before and after the next optimizer's step, and record it if that is due."""
        self._watch(is_watched=self._components.has_optimizers)
        # Optimizers that step in the backward pass free each gradient before the next one exists.
        is_in_backward = self._backend.backward_node() is not None
        is_possible = not is_in_backward and not self._backend.owns_history()
        if self.is_step_watched and is_possible:
            with self._errors.suppress("components"):
                self._recorder.record_next_step()

    def _call_each(self, parts: Iterable[Part], call: Callable[[Part], None]) -> None:
        """Call for each part; an error ends only that part's call."""
        for part in parts:
            with self._errors.suppress(part.stage):
                call(part)

    def _watch(self, *, is_watched: bool) -> None:
        """Have the next step of an optimizer announced, or no longer: PyTorch's hook costs time."""
        self.is_step_watched = is_watched
        unwatch, self._unwatch = self._unwatch, None
        if unwatch:
            unwatch()
        if is_watched:
            self._unwatch = self._backend.on_step_begin(self._before_optimizer)

    @shield
    def _before_optimizer(self, optimizer: object, has_closure: bool) -> None:
        """Read before an optimizer's step, in a step that is watched."""
        if not self.is_step_watched:  # an interruption left the hook
            return
        started = time.thread_time()
        with self._errors.suppress("components"):
            if self._backend.is_initialized() and not self._ended:
                self._recorder.before_optimizer(optimizer, has_closure=has_closure)
        self._cost.add(time.thread_time() - started)

    def rename(self, settings: Settings) -> None:
        """From now on, publish under the run name in these settings."""
        self._settings = settings
        if self._process is not None and settings.run is not None:
            self._process = replace(self._process, run=settings.run)

    def _after_read(self, step: int | None) -> None:
        self._clock.note_allocations(self._recorder.allocations, at_step=step is not None)
        self._call_each(self._parts.reading, lambda part: part.after_read(step))

    def _tick(self) -> bool:
        """Do the background thread's work, which never reads the allocator in that thread.

        Return whether the next tick must come soon.
        """
        awaited: set[bool | None] = set()
        with self._errors.suppress("setup"):
            # On a busy machine the first tick may come before all parts have begun.
            has_begun = self.file and not self._to_begin
            if has_begun and self._backend.is_initialized() and not self._ended:
                self.measure()
                self._call_each(self._parts.ticking, lambda part: awaited.add(part.at_tick()))
                if self._parts.due_step < self._due_step:
                    self._due_step = 0  # the next step sets it, as the training thread may now
                now = time.perf_counter()
                self.reader.request(now, is_idle=self._is_idle(now))
                self.measure()
                self.publish(routine=True)
        self._errors.log_deferred()
        return True in awaited

    def _is_idle(self, now: float) -> bool:
        return self._clock.last is None or now - self._clock.last > self._settings.idle_after

    def read_here(self, after: Callable[[], None] | None = None) -> None:
        """Read between two steps in the calling thread, call `after`, and publish."""
        if not self.is_running or not self._backend.is_initialized():
            return
        started = time.thread_time()
        self.reader.read()
        if after is not None:
            after()
        self.publish()
        self._cost.add(time.thread_time() - started)

    def measure(self) -> None:
        """Measure the newest snapshot, which needs no access to the allocator."""
        self.reader.measure(self.on_snapshot)

    def _on_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        """Keep the evidence; an exception here would replace the user's OutOfMemoryError.

        Python's collector stays off: it would free what was garbage at the OOM, before it is read.
        """
        if not self.is_running:
            return
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._examine(device, requested, limit, driver_free)
        finally:
            if was_enabled:
                gc.enable()

    def _examine(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        origin, records = None, None
        with self._errors.suppress("oom"):
            origin = calling_origin(self._backend.backward_node(), self._context.phases.current)
            records = self._backend.gradients_enabled()
        failed = FailedAllocation(device, requested, limit, driver_free, origin, records)
        ooms = self._context.ooms
        self._keep_oom(failed, lambda: ooms.examine(failed, self._about(origin)))

    def on_library_oom(self, failed: LibraryOom) -> None:
        """Keep the evidence of a library's OOM."""
        if self.is_running:
            ooms = self._context.ooms
            about = partial(self._about, failed.origin)
            self._keep_oom(None, lambda: ooms.examine_library(failed, about()))

    def _about(self, origin: Origin | None) -> Circumstances:
        """Return what is known about the run when a request fails."""
        world = self._process.world_size if self._process else None
        return Circumstances(
            steps=self._clock.count,
            phase=self._context.evaluation.phase(origin),
            is_training=bool(self._backend.gradients_enabled()) or trains(origin),
            is_alone=world in {None, 1},
        )

    def _keep_oom(
        self, failed: FailedAllocation | None, examine: Callable[[], OomObservation | None]
    ) -> None:
        """Read, publish, and call the parts, in this order: each may be the last that succeeds."""
        started, spent, oom = time.perf_counter(), time.thread_time(), Oom(failed, None)
        self.oom_pending = self._is_rank = True
        with self._errors.suppress("setup"):
            self._recorder.read_settings()
        with self._errors.suppress("oom"):
            oom.observation = examine()
        self.publish()
        self._call_each(self._parts.all, lambda part: part.at_oom(oom))
        self._recorder.oom_seconds = time.perf_counter() - started
        self._cost.add(time.thread_time() - spent)

    def publish(self, *, routine: bool = False) -> None:
        """Write a rank's current state to all outputs; a `routine` one only where it is due."""
        if self.file is None or not self.is_rank:
            return
        with self._errors.suppress("publish"):
            write = partial(self._write, self.file, routine=routine)
            sample = call_holding(self._publishing, LOCK_SECONDS, write)
            self._call_each(
                self._parts.publishing, lambda part: part.at_publish(sample, routine=routine)
            )

    def _write(self, file: SampleFile, *, routine: bool) -> Sample:
        sample = self.sample()
        with self._errors.suppress("publish"):
            (file.refresh if routine else file.write)(sample)
        return sample

    @property
    def newest(self) -> Sample | None:
        """The newest published sample."""
        return self.file.newest if self.file else None

    def sample(self) -> Sample:
        """Return the current state as it is published; only after `start`.

        Impossible values are left out and counted.
        """
        draft = Draft(self._recorder.samples())
        self._call_each(self._parts.completing, lambda part: part.complete(draft))
        sample, faults = possible(state := self._state(draft))
        for fault in faults:
            self._errors.count("values", ValueError(f"{fault.field} is {fault.reason}"))
        return sample or state

    def _state(self, draft: Draft) -> Sample:
        recorder, settings = self._recorder, self._settings
        # The script may create its process group after CUDA, and destroy it before the end.
        environment, world = self._context.environment, self._backend.world()
        self._process = placed(self.process, settings, environment, world)
        return Sample(
            timestamp=time.time(),
            process=self._process,
            steps=self._clock.steps(),
            cost=SelfCost(
                recorder.stats_seconds,
                recorder.snapshot_seconds,
                self._cost.seconds,
                dict(self._errors.counts),
                recorder.oom_seconds,
            ),
            allocator_settings=recorder.settings,
            settings_ignored=ignored_settings(environment, recorder.settings),
            oom_pending=self.oom_pending,
            ended=self._ended,
            stall_after_seconds=None if self._clock.waits else settings.stall_after,
            **draft.finished(),
        )

    def abandon(self) -> None:
        """Stop and publish nothing, for a session whose start was interrupted."""
        self._ended = "exited"
        self._watch(is_watched=False)
        self.reader.stop()
        self._sampler.stop(JOIN_SECONDS)
        self._end_parts(may_read=False)

    def end(self, ending: Ending) -> None:
        """Stop, and publish the last state, marked as ended. Publishes nothing before `start`."""
        self._ended = ending
        self._watch(is_watched=False)
        self.reader.stop()
        if self.file is None or not self.is_active:
            return
        may_read = not self._sampler.stop(JOIN_SECONDS) and self._backend.is_initialized()
        if may_read:
            with self._errors.suppress("components"):
                self._recorder.stop_recording()
            self.reader.read()
            self.measure()
        if self._recorder.samples():
            self.publish()
        self._end_parts(may_read=may_read)

    def _end_parts(self, *, may_read: bool) -> None:
        with self._errors.suppress("exit"):
            self._sigterm.remove()
            if self.file:
                self.file.reserve.release()
        self._call_each(reversed(self._parts.all), lambda part: part.end(may_read=may_read))

    def close_in_child(self) -> None:
        """Remove the hooks that a forked child inherited."""
        self._watch(is_watched=False)
        self._sigterm.remove()
