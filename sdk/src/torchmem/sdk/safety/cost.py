"""What the SDK may cost: every budget, the cadences that keep them, and the CPU time spent.

Budgets are shares of wall time. The measurements are in docs/measurements/overhead.md.
"""

from __future__ import annotations

import random

from torchmem.sample.native_threads import Lock
from torchmem.sdk.safety.interruptions import call_with

# Defaults of the settings `interval`, `snapshot_interval` and `snapshot_budget`.
INTERVAL_SECONDS = 1.0
SNAPSHOT_INTERVAL_SECONDS = 10.0
SNAPSHOT_BUDGET = 0.0006

# Share of wall time for reads of the statistics, at a step's end and while no step comes.
READ_BUDGET = 0.00005
IDLE_READ_BUDGET = 0.005
# Share of wall time for ticks of the background thread.
TICK_BUDGET = 0.0001
# A read or a tick over its budget runs less often, but never so late that a scrape would notice.
MAX_STRETCH = 5.0
MAX_STRETCHED_SECONDS = 10.0

# Shortest mean pause between snapshots if the newest is outdated, as after a release, and while
# someone looks at the memory map. Their budget stays.
SOON_SNAPSHOT_SECONDS = 2.0

# Judging what grows, in the background thread.
GROWTH_BUDGET = 0.0003

# Counting what holds the memory (`components.optimizers`): the share of wall time for repeated
# work, the share while a count is spread over many steps, and the longest part of it in one step.
COMPONENT_BUDGET = 0.0001
TRACK_BUDGET = 0.0005
# A part that would be counted more rarely, or whose callable was last called before that, is left
# out.
MAX_PART_SECONDS = 60.0
COUNT_SHARE = 0.005
MAX_SLICE_SECONDS = 0.005
# Pauses between two counts: if nothing seems to have changed, and after an unexplained change.
RECOUNT_SECONDS = 600.0
MIN_RECOUNT_SECONDS = 60.0
# A change in the optimizers is counted as soon as this share of wall time allows.
CHANGE_BUDGET = 0.001

# Parameters are counted by module (`components.modules`) this long after the first read, if no
# optimizer has stepped.
MODULES_AFTER_SECONDS = 30.0

# Recordings of one step (`components.step_trace`): their share of wall time, the shortest pause,
# and the one after an exact peak is known. They keep MIN_TRACE_ENTRIES allocations and frees, then
# as many as the step had that did not fit. With MAX_TRACE_ENTRIES they take 58 MiB of host memory
# and 90 ms at its end.
TRACE_BUDGET = 0.00005
TRACE_SECONDS = 60.0
REPEATED_TRACE_SECONDS = 600.0
MIN_TRACE_ENTRIES = 20_000
MAX_TRACE_ENTRIES = 80_000
# Steps at the beginning that are read before and after the optimizer's step, whatever `interval`.
FIRST_STEPS = 10

# What a step without a read costs at most, with cold caches.
MAX_STEP_SECONDS = 0.00002
# Shortest pause of the background thread, whatever `interval` is.
MIN_PAUSE_SECONDS = 0.001

# Longest pause while another process waits for this one's memory, or is served without a step.
AWAITED_PAUSE_SECONDS = 0.05

# Before the first tick, while the CUDA context is being created.
FIRST_PAUSE_SECONDS = 0.05

# A read that took longer waited for the allocator's lock while it held the GIL.
SLOW_READ_SECONDS = 0.005
BACK_OFF_SECONDS = 10.0
MAX_PAUSE_SECONDS = 600.0

# An unchanged sample is written again after this time. An exporter that cannot see the process
# judges it by the age of its sample, after a minute.
HEARTBEAT_SECONDS = 15.0
# Pause between reads of host memory, which read several files of the kernel.
HOST_READ_SECONDS = 15.0
# Pause between reads of what NCCL's communicators hold, 2 us a group.
COMMUNICATOR_READ_SECONDS = 60.0
# Rendering a textfile takes milliseconds, and node_exporter is rarely scraped more often.
TEXTFILE_SECONDS = 10.0

# The setting `port`: the shares of wall time for requests and for rendering the
# page, which is kept for this time or longer, but never until the next scrape.
ENDPOINT_BUDGET = 0.005
MAX_ENDPOINT_PAUSE_SECONDS = 1.0
PAGE_BUDGET = 0.005
PAGE_SECONDS = 1.0
MAX_PAGE_SECONDS = 10.0

# Recordings kept at OutOfMemoryErrors (`capture.oom_trace`): their share of wall time, and what may
# be spent at once. One takes up to 3 s and 400 MiB of host memory.
OOM_TRACE_BUDGET = 0.01
OOM_TRACE_RESERVE_SECONDS = 10.0

# Details of OOM reports (`oom.details`): their share of wall time, and what may be spent at once.
# The tensors of one OOM take up to 0.2 s, its lines 0.1 s and 0.1 s more with 2,000 stacks.
OOM_DETAILS_BUDGET = 0.01
OOM_DETAILS_RESERVE_SECONDS = 1.0

# The setting `history`. An allocation with a stack of 20 to 80 Python frames takes 0.8 to 1.6 us
# more while stacks are recorded (docs/measurements/overhead.md).
RECORDED_ALLOCATION_SECONDS = 0.000002
# Share of wall time for it with "oom", and what may be spent at once. A recording that has spent
# all of it resumes when a part is there again.
HISTORY_BUDGET = 0.005
HISTORY_RESERVE_SECONDS = 5.0
HISTORY_RESUME_SECONDS = 1.0
# What the comparisons of lines may spend at once, in addition to the budget for snapshots, so that
# a job of a few seconds has some.
LOOKS_RESERVE_SECONDS = 0.05


class CpuMeter:
    """A sum of CPU seconds over all threads in which the SDK runs.

    Callers add differences of `time.thread_time`. Safe against threads and signal handlers.
    Reading that clock costs more than a step without a read, so `step_seconds` is wall time, of
    each step MAX_STEP_SECONDS at most: the thread may have waited for the core.
    """

    def __init__(self) -> None:
        # Without the lock and a method, as steps are frequent and mostly end in one thread.
        self.step_seconds = 0.0
        self._seconds = 0.0
        # Reentrant: a signal handler may call `add` in the thread that holds the lock.
        self._lock = Lock(reentrant=True)

    def add(self, seconds: float) -> None:
        """Add what one thread has spent."""
        call_with(self._lock, lambda: self._add(seconds))

    def _add(self, seconds: float) -> None:
        self._seconds += seconds

    @property
    def seconds(self) -> float:
        """The sum so far."""
        return self._seconds + self.step_seconds


def routine_pause(interval: float, spent: float, budget: float) -> float:
    """Return the seconds until routine work that took `spent` seconds runs again.

    The pause is `interval`, or longer to keep the budget: at most MAX_STRETCH times as long, and
    at most MAX_STRETCHED_SECONDS unless `interval` itself is longer.
    """
    longest = max(interval, min(MAX_STRETCH * interval, MAX_STRETCHED_SECONDS))
    return min(max(interval, spent / budget), longest)


class Allowance:
    """CPU seconds that may be spent: a share of wall time, saved up to `reserve`, full at first."""

    def __init__(self, budget: float, reserve: float) -> None:
        self._budget = budget
        self._reserve = reserve
        self._left = reserve
        self._updated: float | None = None

    def is_left(self, now: float, *, resuming: bool) -> bool:
        """Return whether something is left at `now`, in monotonic seconds; enough to resume."""
        self.spend(now, 0.0)
        return self._left > (HISTORY_RESUME_SECONDS if resuming else 0.0)

    def spend(self, now: float, seconds: float) -> None:
        """Subtract `seconds`."""
        earned = 0.0 if self._updated is None else self._budget * (now - self._updated)
        self._updated = now
        self._left = min(self._reserve, self._left + earned) - seconds


class Cadence:
    """Decides when the next read is due, at random times that do not follow the phases of a step.

    `interval` is the shortest mean pause in seconds, `budget` the share of wall time for reads.
    """

    def __init__(
        self, interval: float, budget: float, generator: random.Random | None = None
    ) -> None:
        self._interval = interval
        self._budget = budget
        self._random = generator or random.Random()  # noqa: S311 - jitter, not a secret
        self._due = 0.0
        self._last: tuple[float, float] | None = None

    def pace(self, interval: float) -> None:
        """Change the shortest mean pause, starting from the latest read."""
        if interval != self._interval:
            self._interval = interval
            if self._last:
                self.record(*self._last)

    def is_due(self, now: float) -> bool:
        """Return whether a read may start at `now`, in monotonic seconds."""
        return now >= self._due

    def record(self, now: float, duration: float) -> None:
        """Set the next due time after a read that took `duration` seconds and ended at `now`."""
        self._last = now, duration
        pause = max(self._interval, duration / self._budget)
        if duration > SLOW_READ_SECONDS:
            pause = max(pause, BACK_OFF_SECONDS)
        self._due = now + min(pause, MAX_PAUSE_SECONDS) * self._random.uniform(0.5, 1.5)
