"""When the allocator is read.

Statistics are read at the ends of steps, and rarely while there are no steps. Snapshots are taken
at random moments. Between two steps, the background thread asks for a read and the main thread
reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torchmem.sdk.observation import MeasuredSnapshot
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import (
    IDLE_READ_BUDGET,
    READ_BUDGET,
    SOON_SNAPSHOT_SECONDS,
    Cadence,
    CpuMeter,
    routine_pause,
)
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.main_thread import MainThreadReader
from torchmem.sdk.settings import Settings


class Reader:
    """Reads when a read is due, and within the budgets.

    `after_read` is called after each read of the statistics, with the count of the step that ended
    or None. `next_read` is the time from which a step's end is read, by `time.perf_counter`.
    """

    def __init__(
        self,
        recorder: Recorder,
        settings: Settings,
        errors: Errors,
        cost: CpuMeter,
        after_read: Callable[[int | None], None],
    ) -> None:
        self.next_read = 0.0
        self._recorder = recorder
        self._settings = settings
        self._errors = errors
        self._cost = cost
        self._after_read = after_read
        self._main_thread = MainThreadReader(recorder.backend.call_soon)
        self._snapshots = Cadence(settings.snapshot_interval, settings.snapshot_budget)
        self._idle_reads = Cadence(settings.interval, IDLE_READ_BUDGET)
        self._is_requested = False
        self._has_stopped = False

    def at_step(self, step: int, now: float) -> None:
        """Read at the end of a step, in its thread."""
        counts = self._recorder.components.is_counting
        spent = 0.0 if counts else self._recorder.stats_seconds or 0.0
        self.next_read = now + routine_pause(self._settings.interval, spent, READ_BUDGET)
        with self._errors.suppress("stats"):
            self._recorder.read_settings()
            self._recorder.read_stats("step")
        self._recorder.add_points(step)
        self._finish_read(step)
        self._main_thread.at_step()

    def early(self, step: int) -> None:
        """Read the allocated bytes at the end of one of the first steps, in its thread."""
        with self._errors.suppress("stats"):
            self._recorder.read_early(step)

    def read(self) -> None:
        """Read the statistics between two steps."""
        with self._errors.suppress("stats"):
            self._recorder.read_settings()
            self._recorder.read_stats()
        self._finish_read(None)

    def _finish_read(self, step: int | None) -> None:
        if not self._has_stopped:
            self._after_read(step)
        self._idle_reads.record(time.perf_counter(), self._recorder.read_seconds or 0.0)

    def request_snapshot(self) -> None:
        """Have the next snapshot taken soon, even if no block has changed since the newest."""
        self._is_requested = True

    def request(self, now: float, *, is_idle: bool) -> None:
        """Have the main thread read what is due; in the background thread."""
        must_snapshot, self._is_requested = self._is_requested, False
        layout = self._is_snapshot_due(now, is_soon=must_snapshot)
        is_due = self._idle_reads.is_due(now) or not self._recorder.has_allocated
        stats = is_idle and (is_due or layout)

        def read() -> None:
            started = time.thread_time()
            # Asked once more: the main thread may run this long after the session was closed.
            if stats and not self._has_stopped:
                self.read()
            if layout and not self._has_stopped:
                # A snapshot that is kept gets the time of the statistics that were just read.
                may_keep = stats and not must_snapshot
                if not (may_keep and self._keeps_snapshot()):
                    self._take_snapshot()
            self._cost.add(time.thread_time() - started)

        if stats or layout:
            with self._errors.suppress("snapshot"):
                # Within steps, a late snapshot would always show the end of a long call.
                self._main_thread.request(read, accept_late=is_idle)

    def _is_snapshot_due(self, now: float, *, is_soon: bool = False) -> bool:
        interval = self._settings.snapshot_interval
        if is_soon or self._recorder.is_outdated:
            interval = min(interval, SOON_SNAPSHOT_SECONDS)
        self._snapshots.pace(interval)
        return self._snapshots.is_due(now)

    def _keeps_snapshot(self) -> bool:
        """Return whether the newest snapshot still holds, as in a process that is idle."""
        started = time.perf_counter()
        is_kept = self._recorder.keep_snapshot()
        if is_kept:
            now = time.perf_counter()
            self._snapshots.record(now, now - started)
        return is_kept

    def snapshot_here(self) -> None:
        """Take a snapshot in this thread after a release, as the main thread may do nothing now."""
        if self._is_snapshot_due(time.perf_counter()):
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        with self._errors.suppress("snapshot"):
            self._recorder.take_snapshot()

    def measure(self, use: Callable[[MeasuredSnapshot], None]) -> None:
        """Measure and use the newest snapshot unless that was done, without the allocator."""
        with self._errors.suppress("snapshot"):
            snapshot, started = self._recorder.measure_snapshot(), time.perf_counter()
            if snapshot:
                use(snapshot)
                spent = (self._recorder.snapshot_seconds or 0.0) + time.perf_counter() - started
                self._snapshots.record(time.perf_counter(), spent)

    def stop(self) -> None:
        """Stop reading for the background thread."""
        self._has_stopped = True
        self._main_thread.stop()
