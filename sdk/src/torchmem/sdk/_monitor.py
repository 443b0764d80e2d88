"""SIGTERM, as launchers send it: publish once more, then do what would have been done.

The background thread: publishes, takes snapshots at random moments, reads statistics when no step comes.

`Monitor`: watches one process's allocator from CUDA's initialisation to the end; a forked child gets its own.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType

from torchmem.allocator.backend import Backend
from torchmem.allocator.settings import ignored_settings
from torchmem.sample.sample import Ending, Process, Sample, SelfCost
from torchmem.sdk._capture import Capture
from torchmem.sdk._cost import Cadence, CpuMeter, affordable
from torchmem.sdk._errors import Errors
from torchmem.sdk._identity import identify
from torchmem.sdk._main_thread import Moments
from torchmem.sdk._oom import Evidence
from torchmem.sdk._peaks import Phases
from torchmem.sdk._publish import Publisher
from torchmem.sdk._recorder import Recorder
from torchmem.sdk._release import Release
from torchmem.sdk._settings import Settings
from torchmem.sdk.steps import StepClock


def before_sigterm(flush: Callable[[], None]) -> None:
    """Let `flush` run before the script's own SIGTERM handler.

    Only where there is one. A handler in Python waits until the main thread is back in Python, so in the place of the
    default action it would keep a rank alive that hangs in a collective; such a rank must die at once, and what it
    published last is at most one interval old.
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


# Share of wall time that ticks may take as long as that only stretches their interval.
TICK_BUDGET = 0.0001


class Sampler:
    """Calls `tick` about every `interval` seconds in a daemon thread until stopped; all that it costs is metered."""

    def __init__(self, tick: Callable[[], None], interval: float, meter: CpuMeter) -> None:
        self._tick = tick
        self._interval = interval
        self._meter = meter
        self._running = (
            threading.Lock()
        )  # held until `stop`; waiting for it is much cheaper than for an Event
        self._thread = threading.Thread(target=self._run, name="torchmem-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._running.acquire()
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end, wait at most `timeout` seconds; True when it is stuck, most likely in the driver."""
        if self._running.locked():
            self._running.release()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return False
        self._thread.join(timeout)
        return self._thread.is_alive()

    def _run(self) -> None:
        chance = random.Random()  # noqa: S311 - jitter, not a secret
        counted, pause = 0.0, self._interval
        while not self._running.acquire(timeout=pause * chance.uniform(0.75, 1.25)):
            self._tick()
            total = time.thread_time()  # since the thread began: waking up is part of the price
            spent, counted = total - counted, total
            self._meter.add(spent)
            pause = affordable(self._interval, spent, TICK_BUDGET)


# Shares of wall time that reads of the statistics may take: at a step's end, and while no step comes.
READ_BUDGET = 0.00005
IDLE_READ_BUDGET = 0.005
JOIN_SECONDS = 0.5


class Monitor:
    """At rest until `wake`: no thread, no file, nothing measured. Its methods let no error of ours out."""

    def __init__(
        self, settings: Settings, backend: Backend, environment: Mapping[str, str], errors: Errors
    ) -> None:
        self.recorder = Recorder(backend)
        self.cost = CpuMeter()
        self.phases = Phases(
            self.recorder, errors, self.cost, settings.interval, reset_peaks=settings.reset_peaks
        )
        self.oom_pending = False
        self.publisher: Publisher | None = None
        self._settings = settings
        self._backend = backend
        self._environment = environment
        self._errors = errors
        self._clock = StepClock()
        self._moments = Moments(lambda call: backend.call_soon(errors.quiet(call)))
        self._snapshots = Cadence(settings.snapshot_interval, settings.snapshot_budget)
        self._idle_reads = Cadence(settings.interval, IDLE_READ_BUDGET)
        self._sampler = Sampler(self._tick, settings.interval, self.cost)
        self._release = Release.wanted(settings, self.recorder, errors, self.phases.reset)
        self._capture: Capture | None = None
        self._evidence: Evidence | None = None
        self._pid: int | None = None
        self._process: Process | None = None
        self._next_read = 0.0
        self._ended: Ending | None = None

    @property
    def is_awake(self) -> bool:
        """Whether it watches this very process."""
        return self._pid == os.getpid()

    def wake(self) -> None:
        """CUDA came up in this process: attach the observer and start to publish."""
        if self._pid is not None or self._ended:
            return
        self._pid = os.getpid()
        with self._errors.swallow("setup"):
            self._process = identify(self._settings, self._environment, self._backend.versions())
            publisher = Publisher(
                self._settings, self._environment, self._process, self._errors, self.sample
            )
            self._evidence = Evidence(publisher.file.path)
            self._capture = Capture(self._backend, publisher.file.path, self._errors)
            self.publisher = publisher
            before_sigterm(self._errors.quiet(self._flush))
            self._sampler.start()
        with self._errors.swallow("oom"):
            self._backend.on_oom(self._on_oom)
        if self.publisher:
            self.publisher.open_endpoint()

    def _flush(self) -> None:
        """In a signal handler, which forked children inherit."""
        if self.publisher and self.is_awake:
            self.publisher.publish()

    def step(self, samples: int | None) -> None:
        """The end of a training step, in the training thread."""
        now = time.perf_counter()
        self._clock.tick(now, samples)
        self.oom_pending = False
        if now >= self._next_read and not self._ended and self._backend.is_initialized():
            self._next_read = now + affordable(
                self._settings.interval, self.recorder.stats_seconds or 0.0, READ_BUDGET
            )
            self.wake()
            self._read_stats()
            self._moments.at_step()
            if self._release:
                self._release.at_step(now)
        if self._capture:
            self._capture.at_step()

    def _read_stats(self) -> None:
        with self._errors.swallow("stats"):
            self.recorder.read_settings()
            self.recorder.read_stats()
        self._idle_reads.spent(time.perf_counter(), self.recorder.stats_seconds or 0.0)

    def _tick(self) -> None:
        """In the sampler's thread, which never asks the allocator itself; see `_moments`."""
        with self._errors.swallow("setup"):
            if (
                self.publisher
                and self._evidence
                and self._backend.is_initialized()
                and not self._ended
            ):
                self._measure()
                self._ask(time.perf_counter())
                self._measure()
                if self._capture:
                    self._capture.tick()
                self.publisher.publish(news_only=True)
                if self.publisher.file.newest:
                    self._evidence.remember(self.publisher.file.newest)
        self._errors.say()

    def _ask(self, now: float) -> None:
        is_idle = self._clock.last is None or now - self._clock.last > self._settings.idle_after
        stats, layout = is_idle and self._idle_reads.is_due(now), self._snapshots.is_due(now)
        if stats or layout:
            with self._errors.swallow("snapshot"):
                self._moments.ask(partial(self._read, stats=stats, layout=layout), patient=is_idle)

    def _read(self, *, stats: bool, layout: bool) -> None:
        """At a moment that `_moments` found."""
        started = time.thread_time()
        if stats and not self._ended:
            self._read_stats()
        if layout and not self._ended:
            with self._errors.swallow("snapshot"):
                self.recorder.take_snapshot()
        self.cost.add(time.thread_time() - started)

    def _measure(self) -> None:
        """What the newest snapshot means; the arithmetic needs no moment of its own."""
        with self._errors.swallow("snapshot"):
            if self.recorder.measure_snapshot():
                self._snapshots.spent(time.perf_counter(), self.recorder.snapshot_seconds or 0.0)

    def _on_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        """Never raises: an exception here would replace the user's OutOfMemoryError."""
        if self._ended or not self.is_awake:
            return
        started, spent, scene = time.perf_counter(), time.thread_time(), None
        self.oom_pending = True
        with self._errors.swallow("setup"):
            self.recorder.read_settings()
        with self._errors.swallow("oom"):
            scene = self.recorder.record_oom(device, requested, limit, driver_free)
        if self.publisher:
            self.publisher.publish()
        with self._errors.swallow("report"):
            if scene and self._evidence:
                self._evidence.write(scene, self.sample())
        if self._capture and self._settings.capture_on_oom:
            self._capture.keep_oom()
        self.recorder.oom_seconds = time.perf_counter() - started
        self.cost.add(time.thread_time() - spent)

    def sample(self) -> Sample:
        """The state of this moment as it is published; only once awake."""
        assert self._process is not None  # noqa: S101 - set before anything that publishes
        recorder = self.recorder
        return Sample(
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
            stall_after_seconds=self._settings.stall_after,
        )

    def end(self, ending: Ending) -> None:
        """Publish the last state, marked as ended, and stop; a Monitor at rest only stays so."""
        self._ended = ending
        self._moments.stop()
        if self.publisher is None or not self.is_awake:
            return
        stuck = self._sampler.stop(JOIN_SECONDS)
        if not stuck and self._backend.is_initialized():
            self._read_stats()
            self._measure()
            if self._capture:
                self._capture.close()
        if self.recorder.samples():
            self.publisher.publish()
        self.publisher.close()
        self._errors.say()
