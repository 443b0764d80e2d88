"""Several runs of one script: a search for the largest value that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmem.preflight.growth import deciding_growth
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.runner import Runner
from torchmem.preflight.script_options import option_of, with_value
from torchmem.sample.errors import UsageError

MAX_VALUE = (1 << 31) - 1
MIN_CONFIRMED_STEPS = 20
CONFIRMED_FACTOR = 2
"""The best value is run again with this many times the steps, and at least the minimum."""


@dataclass(frozen=True, slots=True)
class SearchRange:
    """A range of values of one of the script's options.

    option: the option as the command spells it: "--batch-size" or, for Hydra, "batch_size", or
    "{batch_size}" where the command has that.
    """

    option: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str, command: Sequence[str]) -> SearchRange:
        """Parse a range such as "batch-size=1..64". Raises UsageError."""
        name, _, bounds = text.rpartition("=")
        low, dots, high = bounds.partition("..")
        is_range = dots and low.isdecimal() and high.isdecimal()
        if not (name.strip("-") and is_range and 0 < int(low) <= int(high) <= MAX_VALUE):
            raise UsageError(f"--find-batch {text[:60]!r} is not a range such as batch-size=1..64.")
        return cls(option_of(command, name), int(low), int(high))


@dataclass(frozen=True, slots=True)
class SearchRun:
    """One value and the result of its run. steps: optimizer steps after which it is stopped."""

    value: int
    steps: int
    result: RunResult

    @property
    def fits(self) -> bool:
        """Whether the run did not end with an OutOfMemoryError."""
        return self.result.ended != "oom"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All runs, in ascending order of their values and steps."""

    plan: RunPlan
    search: SearchRange
    runs: tuple[SearchRun, ...]

    @property
    def fits(self) -> bool:
        """Whether a value fits, and memory does not grow with it."""
        return self.best is not None and deciding_growth(self.best.result) is None

    @property
    def best(self) -> SearchRun | None:
        """The longest run of the largest value that fits in all its runs, or None."""
        failed = {run.value for run in self.runs if not run.fits}
        return next((run for run in reversed(self.runs) if run.value not in failed), None)

    def smallest_failure_above(self, value: int) -> int | None:
        """Return the smallest value above `value` that does not fit, or None."""
        failed = (run.value for run in self.runs if run.value > value and not run.fits)
        return min(failed, default=None)

    @property
    def bytes_per_unit(self) -> int | None:
        """Bytes of peak allocated memory per unit of the value; None if fewer than two fit.

        Compares runs with the same number of steps.
        """
        steps = min(run.steps for run in self.runs)
        fitting = [run for run in self.runs if run.fits and run.steps == steps]
        if len(fitting) < 2:
            return None
        first, last = fitting[0], fitting[-1]
        first_peak = first.result.fullest_device.peak_allocated
        last_peak = last.result.fullest_device.peak_allocated
        return (last_peak - first_peak) // (last.value - first.value)


def find_batch(plan: RunPlan, search: SearchRange, runner: Runner) -> SearchResult:
    """Find the largest value that fits by bisection, which assumes that larger values need more.

    The best value is confirmed in a longer run. If it fails there, the values below are searched
    with longer runs. Raises the error of a run that has no verdict.
    """
    runs = _Runs(plan, search, runner)
    _bisect(search.low, search.high, lambda value: runs.fits(value, plan.steps))
    steps = max(MIN_CONFIRMED_STEPS, CONFIRMED_FACTOR * plan.steps)
    while best := runs.result().best:
        too_large = runs.result().smallest_failure_above(best.value)
        # A script that ended by itself does not run longer.
        if best.steps < steps and best.result.ended != "finished":
            runs.fits(best.value, steps)
        elif too_large is None or too_large == best.value + 1:
            break
        else:
            _bisect(best.value, too_large, lambda value: runs.fits(value, steps))
    return runs.result()


class _Runs:
    """Runs values, each at most once with the same number of steps."""

    def __init__(self, plan: RunPlan, search: SearchRange, runner: Runner) -> None:
        self._plan = plan
        self._search = search
        self._runner = runner
        self._runs: dict[tuple[int, int], SearchRun] = {}

    def fits(self, value: int, steps: int) -> bool:
        """Run a value, unless it was run before, and return whether it fits."""
        if (value, steps) not in self._runs:
            self._runs[value, steps] = self._run(value, steps)
        return self._runs[value, steps].fits

    def result(self) -> SearchResult:
        """Return what is known so far."""
        runs = tuple(self._runs[key] for key in sorted(self._runs))
        return SearchResult(self._plan, self._search, runs)

    def _run(self, value: int, steps: int) -> SearchRun:
        command = with_value(self._plan.command, self._search.option, str(value))
        planned = replace(self._plan, command=command, steps=steps)
        result = self._runner.run_captured(planned, f"phantom, {self._search.option} {value}")
        return SearchRun(value, steps, result.checked())


def _bisect(low: int, high: int, fits: Callable[[int], bool]) -> None:
    """Call `fits` for both bounds, and until its largest true and smallest false value touch."""
    if not fits(low) or low == high or fits(high):
        return
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
