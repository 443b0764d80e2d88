"""`Session`: one process's monitoring, from CUDA's initialisation to the end of the process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from torchmem.core.alloc_conf import ignored_settings
from torchmem.core.backend import Backend
from torchmem.core.rundir import sample_name
from torchmem.core.sample import Ending, Process, Sample, SelfCost
from torchmem.sdk._cadence import Cadence, affordable
from torchmem.sdk._capture import Capture
from torchmem.sdk._cost import CpuMeter
from torchmem.sdk._errors import Errors
from torchmem.sdk._evidence import Evidence
from torchmem.sdk._identity import identify, is_multiprocessing_child
from torchmem.sdk._phases import Phase, Phases
from torchmem.sdk._publish import RunFile
from torchmem.sdk._recorder import Recorder
from torchmem.sdk._release import Release
from torchmem.sdk._sampler import Sampler
from torchmem.sdk._settings import Settings
from torchmem.sdk._signals import before_sigterm
from torchmem.sdk._steps import Iterations, StepClock

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchmem.sdk._endpoint import Endpoint
    from torchmem.sdk._textfile import Textfile

# Shares of wall time that reads of the statistics may take: at a step's end, and in the background.
READ_BUDGET = 0.00005
IDLE_READ_BUDGET = 0.005
JOIN_SECONDS = 0.5
PUBLISH_LOCK_SECONDS = 1.0


class Session:
    """Watches this process's allocator; made by `instrument`, closed by hand, by `with`, or at exit."""

    def __init__(self, settings: Settings, backend: Backend, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self.errors = Errors()
        self._backend = backend
        self._environment = environment
        self._explicit_steps = False
        self._closed = False
        self._remove_step_hook = backend.on_step(self._on_step)
        self._rest()
        backend.on_init(self._on_init)

    def _rest(self) -> None:
        """The state before CUDA is up: no thread, no file, nothing measured."""
        self._pid: int | None = None
        self._publishing = threading.Lock()
        self._recorder = Recorder(self._backend)
        self._clock = StepClock()
        self._iterations = Iterations()
        self._cost = CpuMeter()
        self._phases = Phases(
            self._recorder, self.errors, self._cost, self.settings.interval, reset_peaks=self.settings.reset_peaks
        )
        self._release = Release.wanted(self.settings, self._recorder, self.errors, self._phases.reset)
        self._capture: Capture | None = None
        self._next_read = 0.0
        self._oom_pending = False
        self._ended: Ending | None = None
        self._has_settings = False
        self._process: Process | None = None
        self._textfile: Textfile | None = None
        self._endpoint: Endpoint | None = None

    @property
    def url(self) -> str | None:
        """Address of this process's own /metrics, when a port was asked for and CUDA is up."""
        return self._endpoint.url if self._endpoint else None

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
            self._step(samples)
        self._cost.add(time.thread_time() - started)

    def phase(self, name: str) -> Phase:
        """`with session.phase("forward"):` measures the highest allocated bytes within this part of a step.

        A lower bound unless PyTorch's peak moved in the phase; exact with the setting `reset_peaks`. At most 32 names.
        """
        return Phase(self._phases, name)

    def close(self) -> None:
        """Publish the last state, marked as ended, and stop; harmless when called again."""
        self._close("exited")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close("oom" if error is not None and self._oom_pending else "exited")

    def at_exit(self) -> None:
        """Close at interpreter exit: an uncaught exception after an OOM without a later step was that OOM.

        A multiprocessing child catches every exception itself, so there an OOM without a later step is enough.
        """
        uncaught = getattr(sys, "last_value", None) is not None or is_multiprocessing_child()
        self._close("oom" if uncaught and self._oom_pending else "exited")

    def after_fork(self) -> None:
        """In a forked child: forget thread, file and sockets of the parent; wake again if the child starts CUDA."""
        if self._closed or self._pid is None:
            return
        with self.errors.swallow("setup"):
            if self._endpoint:
                self._endpoint.close_in_child()
            self._rest()

    def _on_init(self) -> None:
        started = time.thread_time()
        self._wake()
        self._cost.add(time.thread_time() - started)

    def _wake(self) -> None:
        """CUDA came up in this process: attach the observer and start to publish."""
        if self._closed or self._pid == os.getpid():
            return
        self._pid = os.getpid()
        with self.errors.swallow("setup"):
            self._process = identify(self.settings, self._environment, self._backend.versions())
            name = sample_name(self._process.pid, self._process.pid_namespace, self._process.start_ticks)
            self._file = RunFile(self.settings.directory(self._environment), name)
            self._evidence = Evidence(self._file.path)
            self._capture = Capture(self._backend, self._file.path, self.errors)
            if self.settings.textfile is not None:
                from torchmem.sdk._textfile import Textfile

                self._textfile = Textfile(self.settings.textfile, self._process.rank)
            self._snapshots = Cadence(self.settings.snapshot_interval, self.settings.snapshot_budget)
            self._idle_reads = Cadence(self.settings.interval, IDLE_READ_BUDGET)
            self._sampler = Sampler(self._tick, self.settings.interval, self._cost)
            self._sampler.start()
            before_sigterm(self._publish)
        with self.errors.swallow("oom"):
            self._backend.on_oom(self._on_oom)
        with self.errors.swallow("endpoint"):
            if self.settings.port is not None and self._process is not None:
                from torchmem.sdk._endpoint import Endpoint

                self._endpoint = Endpoint.open(self.settings, self._process.local_rank or 0, self._sample)

    def _read_settings(self) -> None:
        """Read once what stays the same, when CUDA is fully up."""
        if not self._has_settings:
            self._has_settings = True
            self._recorder.read_settings()

    def _on_step(self, optimizer: int) -> None:
        started = time.thread_time()
        with self.errors.swallow("step"):
            self._oom_pending = False
            if not self._explicit_steps and self._iterations.begins(optimizer):
                self._step(None)
        self._cost.add(time.thread_time() - started)

    def _step(self, samples: int | None) -> None:
        now = time.perf_counter()
        self._clock.tick(now, samples)
        self._oom_pending = False
        if now >= self._next_read and not self._closed and self._backend.is_initialized():
            self._next_read = now + affordable(self.settings.interval, self._recorder.stats_seconds or 0.0, READ_BUDGET)
            self._read(now)
            if self._release:
                self._release.at_step(now)
        if self._capture:
            self._capture.at_step()

    def _read(self, now: float) -> None:
        self._wake()
        with self.errors.swallow("stats"):
            self._read_settings()
            self._recorder.read_stats()
        self._idle_reads.spent(now, self._recorder.stats_seconds or 0.0)

    def _tick(self) -> None:
        with self.errors.swallow("setup"):
            if self._backend.is_initialized() and not self._closed:
                self._read_settings()
                self._tick_reads(time.perf_counter())
                if self._capture:
                    self._capture.tick()
                self._publish(news_only=True)
                if self._file.newest:
                    self._evidence.remember(self._file.newest)

    def _tick_reads(self, now: float) -> None:
        idle = self._clock.last is None or now - self._clock.last > self.settings.idle_after
        if idle and self._idle_reads.is_due(now):
            with self.errors.swallow("stats"):
                self._recorder.read_stats()
            self._idle_reads.spent(now, self._recorder.stats_seconds or 0.0)
        if self._snapshots.is_due(now):
            started = time.perf_counter()
            with self.errors.swallow("snapshot"):
                self._recorder.read_snapshot()
            self._snapshots.spent(now, time.perf_counter() - started)

    def _on_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        """Never raises: an exception here would replace the user's OutOfMemoryError."""
        if self._closed or self._pid != os.getpid():
            return
        started, spent, scene = time.perf_counter(), time.thread_time(), None
        self._oom_pending = True
        with self.errors.swallow("setup"):
            self._read_settings()
        with self.errors.swallow("oom"):
            scene = self._recorder.record_oom(device, requested, limit, driver_free)
        self._publish()
        with self.errors.swallow("report"):
            if scene:
                self._evidence.write(scene, self._sample())
        if self._capture and self.settings.capture_on_oom:
            self._capture.keep_oom()
        self._recorder.oom_seconds = time.perf_counter() - started
        self._cost.add(time.thread_time() - spent)

    def _sample(self) -> Sample:
        assert self._process is not None  # noqa: S101 - set before anything that publishes
        recorder = self._recorder
        return Sample(
            timestamp=time.time(),
            process=self._process,
            devices=recorder.samples(),
            steps=self._clock.steps(),
            cost=SelfCost(
                recorder.stats_seconds,
                recorder.snapshot_seconds,
                self._cost.seconds,
                dict(self.errors.counts),
                recorder.oom_seconds,
            ),
            allocator_settings=recorder.settings,
            settings_ignored=ignored_settings(self._environment, recorder.settings),
            oom_pending=self._oom_pending,
            ended=self._ended,
            metrics_url=self.url,
            stall_after_seconds=self.settings.stall_after,
        )

    def _publish(self, *, news_only: bool = False) -> None:
        with self.errors.swallow("publish"):
            mine = self._publishing.acquire(timeout=PUBLISH_LOCK_SECONDS)
            try:
                (self._file.refresh if news_only else self._file.write)(self._sample())
            finally:
                if mine:
                    self._publishing.release()
        with self.errors.swallow("textfile"):
            if self._textfile:
                (self._textfile.refresh if news_only else self._textfile.write)(self._sample())

    def _close(self, ending: Ending) -> None:
        if self._closed:
            return
        self._closed = True
        with self.errors.swallow("exit"):
            self._remove_step_hook()
            if self._pid == os.getpid():
                self._end(ending)

    def _end(self, ending: Ending) -> None:
        stuck = self._sampler.stop(JOIN_SECONDS)
        self._ended = ending
        if not stuck and self._backend.is_initialized():
            with self.errors.swallow("stats"):
                self._recorder.read_stats()
            if self._capture:
                self._capture.close()
        if self._recorder.samples():
            self._publish()
        if self._textfile:
            self._textfile.remove()
        if self._endpoint:
            self._endpoint.close()
