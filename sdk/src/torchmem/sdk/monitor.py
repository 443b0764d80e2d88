"""`Monitor`: follows one process's allocator from CUDA's initialization to the end of the process.

It reads in the training thread at step ends. A background thread publishes, and asks the main
thread for snapshots and, if no step comes, for reads.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import FrameType
from typing import Any, cast

from torchmem.allocator.backend import Backend, OomObserver
from torchmem.allocator.settings import AllocatorConfig, ignored_settings
from torchmem.explain.activity import is_in_optimizer
from torchmem.explain.call_stack import Origin
from torchmem.explain.verdict import Circumstances
from torchmem.sample.sample import Ending, Process, Sample, SelfCost, possible
from torchmem.sdk.capture.capture import Capture
from torchmem.sdk.capture.line_history import LineHistory
from torchmem.sdk.capture.oom_trace import OomTrace
from torchmem.sdk.capture.recorded_history import RecordedHistory
from torchmem.sdk.components.tracked import Moment
from torchmem.sdk.identity import identify, placed
from torchmem.sdk.observation import FailedAllocation as AskedFor
from torchmem.sdk.observation import Oom
from torchmem.sdk.oom.details import OomDetails
from torchmem.sdk.oom.ending import LibraryOom, UncaughtErrors
from torchmem.sdk.oom.observation import FailedAllocation, OomObservation, ReportWriter
from torchmem.sdk.publish.memory_map import MapPublisher
from torchmem.sdk.publish.publisher import Publisher
from torchmem.sdk.pytorch.call_stack import calling_origin
from torchmem.sdk.reading.evaluation import Evaluation
from torchmem.sdk.reading.host import HostReader
from torchmem.sdk.reading.peaks import Phases
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.reading.run_history import EARLY_STEPS
from torchmem.sdk.release.part import ReleasePart
from torchmem.sdk.release.pressure_hooks import PressureHooks
from torchmem.sdk.release.release import Release
from torchmem.sdk.safety.cost import (
    AWAITED_PAUSE_SECONDS,
    FIRST_PAUSE_SECONDS,
    FIRST_STEPS,
    GROWTH_BUDGET,
    IDLE_READ_BUDGET,
    MAX_STEP_SECONDS,
    MIN_PAUSE_SECONDS,
    READ_BUDGET,
    SOON_SNAPSHOT_SECONDS,
    TICK_BUDGET,
    Cadence,
    CpuMeter,
    routine_pause,
)
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import call_if_free
from torchmem.sdk.safety.main_thread import MainThreadReader
from torchmem.sdk.settings import MAX_SECONDS, Settings
from torchmem.sdk.steps import StepClock

JOIN_SECONDS = 0.5


class Monitor:
    """The monitoring of one process; a forked child gets its own.

    Until `start` there is no thread and no file, and nothing is measured. No method lets an error
    of the SDK escape.
    """

    # `start` sets them.
    _capture: Capture | None = None
    _trace: OomTrace | None = None
    _map: MapPublisher | None = None
    _release: ReleasePart | None = None
    _reports: ReportWriter | None = None
    _observer: OomObserver | None = None

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        environment: Mapping[str, str],
        errors: Errors,
        hooks: PressureHooks,
    ) -> None:
        self.recorder = Recorder(backend, errors)
        self.cost = CpuMeter()
        self.host = HostReader(backend)
        self.phases = Phases(
            self.recorder, errors, self.cost, settings.interval, reset_peaks=settings.reset_peaks
        )
        self.oom_pending = False
        self.is_exiting = False
        self.uncaught: UncaughtErrors | None = None
        self.publisher: Publisher | None = None
        self._settings = settings
        self._backend = backend
        self._environment = environment
        self._errors = errors
        self._clock = StepClock()
        self._evaluation = Evaluation(backend.modules())
        self._main_thread = MainThreadReader(
            lambda call: backend.call_soon(errors.defer_logging(call))
        )
        self._snapshots = Cadence(settings.snapshot_interval, settings.snapshot_budget)
        self._idle_reads = Cadence(settings.interval, IDLE_READ_BUDGET)
        self._judgments = Cadence(settings.interval, GROWTH_BUDGET)
        self._sampler = Sampler(self._tick, settings.interval, self.cost, self._is_awaited)
        self._hooks = hooks
        self._history = LineHistory.from_settings(settings, self.recorder, errors, self.cost)
        self._to_start = deque(self._parts())
        self._starting = threading.Lock()
        self._pid: int | None = None
        self._process: Process | None = None
        self._next_read = 0.0
        self._ended: Ending | None = None
        self.is_step_watched = False

    @property
    def is_active(self) -> bool:
        """Whether it was started in this very process."""
        return self._pid == os.getpid()

    def start(self) -> None:
        """Attach the OOM observer and start to publish, once CUDA is up in this process.

        An exception that interrupts it leaves the rest to the next call, that is, to the next step.
        """
        if not self._to_start or self._ended or self._pid not in {None, os.getpid()}:
            return
        self._pid = os.getpid()
        call_if_free(self._starting, self._start)

    def _start(self) -> None:
        while self._to_start:
            self._to_start[0]()
            self._to_start.popleft()

    def _parts(self) -> tuple[Callable[[], None], ...]:
        """Return what `start` calls, in order. Each may be called again after an interruption."""
        return (
            self._open_publisher,
            self._start_sampler,
            self._begin_trace,
            self._begin_history,
            self._watch_ooms,
            self._open_endpoint,
        )

    def _open_publisher(self) -> None:
        with self._errors.suppress("setup"):
            self._process = identify(self._settings, self._environment, self._backend.versions())
            publisher = Publisher(
                self._settings, self._environment, self._process, self._errors, self.sample
            )
            self._reports = ReportWriter(publisher.file.path)
            history = RecordedHistory(self._backend, self.recorder.allocated_peaks)
            path = publisher.file.path
            self._capture = Capture(history, path, self._errors, before_start=self._stop_history)
            if self._settings.capture_on_oom == "trace":
                stacks = self._settings.history is True
                self._trace = OomTrace(history, path, self._errors, with_stacks=stacks)
            self._map = MapPublisher(
                publisher.file.path, self._errors, enabled=self._settings.memory_map
            )
            release = Release(
                self.recorder, self._errors, self._settings, self.phases.reset, self._hooks
            )
            after = self._snapshot_after_release
            self._release = ReleasePart(release, publisher.file.path, self._clock, after)
            self.publisher = publisher

    def _start_sampler(self) -> None:
        with self._errors.suppress("setup"):
            if self.publisher:
                run_before_sigterm_handler(self._errors.defer_logging(self._publish_in_handler))
                self._sampler.start()

    def _begin_trace(self) -> None:
        if self._trace:
            self._trace.begin()

    def _begin_history(self) -> None:
        if self._history:
            self._history.begin()

    def _watch_ooms(self) -> None:
        """Attach an observer; one that an interrupted start has left does nothing."""

        def observe(device: int, requested: int, limit: int, driver_free: int) -> None:
            if self._observer is observe:
                self._on_oom(device, requested, limit, driver_free)

        with self._errors.suppress("oom"):
            self._observer = observe
            self._backend.on_oom(observe)
            if self.uncaught:
                self.uncaught.install()

    def _open_endpoint(self) -> None:
        if self.publisher:
            self.publisher.open_endpoint()

    def _stop_history(self) -> None:
        if self._history:
            with self._errors.suppress("history"):
                self._history.stop()

    def _publish_in_handler(self) -> None:
        """Publish in a signal handler, which forked children inherit."""
        if self.publisher and self.is_active:
            self.publisher.publish()

    def step(self, now: float, samples: int | None) -> None:
        """Count a training step that ends at `now`, by `time.perf_counter`, in its thread."""
        self._clock.tick(now, samples)
        self.oom_pending = False
        is_first = self._clock.count <= FIRST_STEPS and self.recorder.components.has_optimizers
        looks = self._history is not None and self._clock.count >= self._history.next_look
        begins = (is_first or looks or now >= self._next_read) and not self._ended
        is_due = (begins or self.is_step_watched) and self._backend.is_initialized()
        self.is_step_watched = False
        is_asked = self._release is not None and self._release.wants(self._clock.count) == "read"
        is_due = is_due or is_asked
        if not is_due and self._clock.count <= EARLY_STEPS and not self._ended:
            self._read_early()
        if is_due or (self._capture and self._capture.is_busy):
            started = time.thread_time()
            if is_due:
                self._read_at_step(now)
            if self._capture:
                self._capture.at_step()
            if is_due and begins:
                self._watch_next_step()
            self.cost.add(time.thread_time() - started)

    def progress(self, *, waits: bool) -> None:
        """Note that a pass of the loop began or ended; if it `waits`, no step is expected now."""
        self._clock.progress, self._clock.waits = time.perf_counter(), waits

    def add_samples(self, samples: int) -> None:
        """Count training samples."""
        self._clock.add_samples(samples)

    def rename(self, settings: Settings) -> None:
        """Publish under the name of the run in these settings from now on."""
        self._settings = settings
        if self._process is not None and settings.run is not None:
            self._process = replace(self._process, run=settings.run)

    def _watch_next_step(self) -> None:
        """Read before and after the next optimizer's step, and record it if that is due."""
        self.is_step_watched = self.recorder.components.has_optimizers
        if self.is_step_watched and not (self._capture and self._capture.is_busy):
            with self._errors.suppress("components"):
                self.recorder.record_next_step()

    def before_optimizer(self, optimizer: object, *, has_closure: bool) -> None:
        """Read before an optimizer's step, in a step that is watched."""
        started = time.thread_time()
        with self._errors.suppress("components"):
            if self._backend.is_initialized() and not self._ended:
                self.recorder.before_optimizer(optimizer, has_closure=has_closure)
        self.cost.add(time.thread_time() - started)

    def _read_early(self) -> None:
        started = time.thread_time()
        with self._errors.suppress("stats"):
            if self._backend.is_initialized():
                self.recorder.read_early(self._clock.count)
                if self._history:
                    self._history.after_early_read(self._clock.count)
        # The session counts the first MAX_STEP_SECONDS of every step.
        self.cost.add(max(0.0, time.thread_time() - started - MAX_STEP_SECONDS))

    def _read_at_step(self, now: float) -> None:
        cost = 0.0 if self.recorder.components.is_counting else self.recorder.stats_seconds or 0.0
        self._next_read = now + routine_pause(self._settings.interval, cost, READ_BUDGET)
        self.start()
        self._read_stats("step")
        self.recorder.add_points(self._clock.count)
        with self._errors.suppress("step"):
            self._evaluation.at_step()
        if any(record.components for record in self.recorder.records().values()):
            self._clock.read_count = self._clock.count
        self._main_thread.at_step()
        if self._history:
            self._history.at_step(self._clock.count)
        if self._release:
            self._release.at_step(self._clock.count)

    def _read_stats(self, moment: Moment = "idle") -> None:
        with self._errors.suppress("stats"):
            self.recorder.read_settings()
            self.recorder.read_stats(moment)
            self.host.read_pinned()
        if self._history and not self._ended:
            self._history.after_read(self._clock.count if moment == "step" else None)
        self._idle_reads.record(time.perf_counter(), self.recorder.read_seconds or 0.0)

    def _tick(self) -> None:
        """Do the background thread's work, which never reads the allocator in that thread."""
        with self._errors.suppress("setup"):
            if (
                self.publisher
                and self._reports
                and self._backend.is_initialized()
                and not self._ended
            ):
                self._measure()
                self._watch_map()
                self._pace_snapshots()
                self._request_reads(time.perf_counter())
                self._measure()
                with self._errors.suppress("stats"):
                    self.host.read_memory()
                    self._judge_growth()
                if self._capture:
                    self._capture.tick()
                if self._release:
                    self._release.at_tick()
                self.publisher.publish(news_only=True)
                self.publisher.tick()
                with self._errors.suppress("report"):
                    self._reports.mark_survived(lambda: self.oom_pending)
                if self.publisher.file.newest:
                    self._reports.remember(self.publisher.file.newest)
        self._errors.log_deferred()

    def _judge_growth(self) -> None:
        now = time.perf_counter()
        if self._judgments.is_due(now):
            self.recorder.judge_growth()
            ended = time.perf_counter()
            self._judgments.record(ended, ended - now)

    def _snapshot_after_release(self) -> None:
        self._take_snapshot_here()
        self._measure()

    def _is_awaited(self) -> bool:
        """Return whether a process waits for this one's memory, or may get it at any time."""
        return self._release is not None and self._release.is_awaited

    def wait_for_memory(
        self, wanted: int, seconds: float, device: int | None, *, take: bool
    ) -> bool:
        """Wait in the calling thread until this process can get `wanted` bytes, or has them."""
        if self._release and self.is_active and not self._ended:
            return self._release.wait(wanted, seconds, device, take=take)
        return False

    def release(self, wanted: int) -> int:
        """Release what pressure hooks can spare, and the cache, in the calling thread."""
        if self._release and self.is_active and not self._ended:
            return self._release.by_script(wanted)
        return 0

    def _is_idle(self, now: float) -> bool:
        return self._clock.last is None or now - self._clock.last > self._settings.idle_after

    def _request_reads(self, now: float) -> None:
        is_idle = self._is_idle(now)
        is_due = self._idle_reads.is_due(now) or not self.recorder.records()
        stats, layout = is_idle and is_due, self._snapshots.is_due(now)
        if stats or layout:
            with self._errors.suppress("snapshot"):
                read = partial(self._read, stats=stats, layout=layout)
                self._main_thread.request(read, accept_late=is_idle)

    def _read(self, *, stats: bool, layout: bool) -> None:
        """Read what the background thread asked for, in the main thread."""
        started = time.thread_time()
        if stats and not self._ended:
            self._read_stats()
        if layout and not self._ended:
            with self._errors.suppress("snapshot"):
                self.recorder.take_snapshot()
        self.cost.add(time.thread_time() - started)

    def _watch_map(self) -> None:
        if self._map:
            self._map.tick(keep=self.oom_pending)

    def _pace_snapshots(self) -> None:
        """Take snapshots soon if the newest is outdated, or while someone looks at the map."""
        is_watched = self._map is not None and self._map.is_asked
        interval = self._settings.snapshot_interval
        if is_watched or self.recorder.is_outdated:
            interval = min(interval, SOON_SNAPSHOT_SECONDS)
        self._snapshots.pace(interval)

    def _take_snapshot_here(self) -> None:
        """Take a snapshot in this thread after a release, as the main thread may do nothing now."""
        self._pace_snapshots()
        if self._snapshots.is_due(time.perf_counter()):
            with self._errors.suppress("snapshot"):
                self.recorder.take_snapshot()

    def _measure(self) -> None:
        """Measure the newest snapshot, which needs no access to the allocator."""
        with self._errors.suppress("snapshot"):
            snapshot, started = self.recorder.measure_snapshot(), time.perf_counter()
            if snapshot:
                if self._map:
                    config = AllocatorConfig.of(self.recorder.settings)
                    measured = self.recorder.measured()
                    self._map.publish(snapshot.segments, snapshot.timestamp, measured, config)
                spent = (self.recorder.snapshot_seconds or 0.0) + time.perf_counter() - started
                self._snapshots.record(time.perf_counter(), spent)

    def _on_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        """Write the evidence; an exception here would replace the user's OutOfMemoryError."""
        if self._ended or not self.is_active:
            return
        origin = None
        with self._errors.suppress("oom"):
            origin = calling_origin(self._backend.backward_node(), self.phases.current)
        failed = FailedAllocation(requested, limit, driver_free, origin)
        seen = self._keep_oom(lambda: self.recorder.record_oom(device, failed, self._about(origin)))
        with self._errors.suppress("release"):
            asked = AskedFor(device, requested, limit, driver_free, origin)
            if self._release:
                self._release.at_oom(Oom(asked, cast("Any", seen)))

    def on_library_oom(self, failed: LibraryOom) -> None:
        """Write the evidence of a library's OOM."""
        if not self._ended and self.is_active:
            about = partial(self._about, failed.origin)
            self._keep_oom(lambda: self.recorder.record_library_oom(failed, about()))

    def _about(self, origin: Origin | None) -> Circumstances:
        """Return what is known of the run when a request fails."""
        world = self._process.world_size if self._process else None
        return Circumstances(
            steps=self._clock.count,
            phase=self._evaluation.phase(origin),
            is_training=self._backend.is_training() or is_in_optimizer(origin),
            is_alone=world in {None, 1},
        )

    def _keep_oom(self, record: Callable[[], OomObservation | None]) -> OomObservation | None:
        started, spent, observation = time.perf_counter(), time.thread_time(), None
        self.oom_pending = True
        with self._errors.suppress("setup"):
            self.recorder.read_settings()
        with self._errors.suppress("oom"):
            observation = record()
        if self.publisher:
            self.publisher.publish()
        with self._errors.suppress("report"):
            if observation and self._reports:
                observation = self._detailed(observation)
                self._reports.write(observation, self.sample())
        if self._map and observation:
            self._keep_map(self._map, observation)
        if self._trace and self._trace.is_recording:
            self._trace.keep()
        elif self._capture and self._settings.capture_on_oom:
            self._capture.keep_oom()
        self.recorder.oom_seconds = time.perf_counter() - started
        self.cost.add(time.thread_time() - spent)
        return observation

    @cached_property
    def _details(self) -> OomDetails:
        return OomDetails(self._backend)

    def _detailed(self, observation: OomObservation) -> OomObservation:
        """Add which lines grew, who called them for which module, and what the tensors are."""
        with self._errors.suppress("history"):
            if self._history:
                observation = self._history.compared(observation)
            observation = self._details.divide(observation)
            if self._history:
                tensors = self._details.tensors(observation.device)
                observation = replace(observation, tensors=tensors)
        return observation

    def on_fatal_oom(self) -> None:
        """Add to the report of the latest OOM what the tensors are, as the process dies of it."""
        with self._errors.suppress("report"):
            if self._reports and self.oom_pending and self.is_active and not self._ended:
                self._reports.add_tensors(self._details.tensors)

    def _keep_map(self, publisher: MapPublisher, observation: OomObservation) -> None:
        device = self.recorder.records()[observation.device].device
        measured = [(device, observation.layout)] if observation.layout else []
        config = AllocatorConfig.of(self.recorder.settings)
        publisher.keep_oom(observation.segments, measured, config)

    def sample(self) -> Sample:
        """Return the current state as it is published; only after `start`.

        What cannot be true is left out and counted.
        """
        sample, faults = possible(state := self._state())
        for fault in faults:
            self._errors.count("values", ValueError(f"{fault.field} is {fault.reason}"))
        return sample or state

    def _state(self) -> Sample:
        assert self._process is not None  # noqa: S101 - set before anything that publishes
        recorder = self.recorder
        # The script may create its process group after CUDA, and destroy it before the end.
        self._process = placed(self._process, self._settings, self._backend.world())
        sample = Sample(
            timestamp=time.time(),
            process=self._process,
            devices=recorder.samples(),
            steps=self._clock.steps(),
            cost=SelfCost(
                recorder.stats_seconds,
                recorder.snapshot_seconds,
                self.cost.seconds,
                dict(self._errors.counts),
                recorder.oom_seconds,
            ),
            allocator_settings=recorder.settings,
            settings_ignored=ignored_settings(self._environment, recorder.settings),
            oom_pending=self.oom_pending,
            ended=self._ended,
            metrics_url=self.publisher.url if self.publisher else None,
            stall_after_seconds=None if self._clock.waits else self._settings.stall_after,
            host=self.host.memory,
            pinned=self.host.pinned,
            memory_map=self._settings.memory_map,
        )
        return self._release.complete(sample) if self._release else sample

    def abandon(self) -> None:
        """Stop and publish nothing, for a session whose start was interrupted."""
        self._ended = "exited"
        self._main_thread.stop()
        self._sampler.stop(JOIN_SECONDS)
        with self._errors.suppress("exit"):
            if self.publisher:
                self.publisher.close()

    def end(self, ending: Ending) -> None:
        """Stop, and publish the last state, marked as ended. Publishes nothing before `start`."""
        self._ended = ending
        self._main_thread.stop()
        if self.publisher is None or not self.is_active:
            return
        stuck = self._sampler.stop(JOIN_SECONDS)
        if not stuck and self._backend.is_initialized():
            with self._errors.suppress("components"):
                self.recorder.stop_recording()
            self._read_stats()
            self._measure()
            with self._errors.suppress("stats"):
                self.recorder.judge_growth()
            if self._capture:
                self._capture.close()
            if self._trace and not self.is_exiting:
                self._trace.end()
            self._stop_history()
        if self.recorder.samples():
            self.publisher.publish()
        if self._reports:
            with self._errors.suppress("report"):
                self._reports.mark_survived(lambda: self.oom_pending and ending != "exited")
            self._reports.close()
        self.publisher.close()
        self._errors.log_deferred()


class Sampler:
    """A daemon thread that calls `tick` about every `interval` seconds and meters its CPU time.

    The first call comes earlier: what the process holds on its devices is read before NCCL and
    other libraries take more. The pause is short as long as `is_awaited` returns True.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        interval: float,
        meter: CpuMeter,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tick = tick
        self._is_awaited = is_awaited
        self._interval = interval
        self._meter = meter
        # Held until `stop`. Waiting for a lock is much cheaper than waiting for an Event.
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; after an interrupted start too."""
        if self._thread is not None and self._thread.ident is not None:
            return
        self._running.acquire(blocking=False)
        self._thread = threading.Thread(target=self._run, name="torchmem-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end and wait up to `timeout` seconds; return True if it is stuck.

        A stuck thread most likely waits in the driver.
        """
        if self._running.locked():
            self._running.release()
        thread = self._thread
        if thread is None or thread.ident is None or thread is threading.current_thread():
            return False
        thread.join(timeout)
        return thread.is_alive()

    def _run(self) -> None:
        generator = random.Random()  # noqa: S311 - jitter, not a secret
        counted, pause = 0.0, min(self._interval, FIRST_PAUSE_SECONDS)
        while not self._running.acquire(timeout=_bounded(pause) * generator.uniform(0.75, 1.25)):
            self._tick()
            total = time.thread_time()  # since the thread started, so that waking up is included
            spent, counted = total - counted, total
            self._meter.add(spent)
            pause = routine_pause(self._interval, spent, TICK_BUDGET)
            if self._is_awaited():
                pause = min(pause, AWAITED_PAUSE_SECONDS)


def _bounded(pause: float) -> float:
    """Return a pause that a lock accepts as its timeout."""
    return min(max(pause, MIN_PAUSE_SECONDS), MAX_SECONDS)


def run_before_sigterm_handler(flush: Callable[[], None]) -> None:
    """Run `flush` before the script's own SIGTERM handler, which launchers trigger.

    Does nothing without such a handler. A handler in Python waits until the main thread is back in
    Python, so in place of the default action it would keep a rank alive that hangs in a collective.
    Such a rank must die at once; what it published last is at most one interval old.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)
    if not callable(previous):
        return

    def flush_first(number: int, frame: FrameType | None) -> None:
        flush()
        previous(number, frame)

    signal.signal(signal.SIGTERM, flush_first)
