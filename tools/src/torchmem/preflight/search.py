"""Several runs of one script: a search for the largest value that fits, a sweep over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.result import RunResult, no_verdict_error
from torchmem.preflight.runner import Runner
from torchmem.sample.errors import TorchmemError, UsageError

MAX_VALUE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SearchRange:
    """A range of values of one of the script's options.

    option: the option as the script spells it, such as "--batch-size" or, for Hydra, "batch_size".
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
        return cls(_option(command, name), int(low), int(high))

    def command_with(self, command: Sequence[str], value: int) -> tuple[str, ...]:
        """Return the command with the option set to `value`, replaced or else appended."""
        words = list(command)
        for index, word in enumerate(words):
            if word.startswith(f"{self.option}="):
                words[index] = f"{self.option}={value}"
                return tuple(words)
            if word == self.option and index + 1 < len(words):
                words[index + 1] = str(value)
                return tuple(words)
        return (*words, self.option, str(value))


@dataclass(frozen=True, slots=True)
class SearchRun:
    """One value and the result of its run."""

    value: int
    result: RunResult

    @property
    def fits(self) -> bool:
        """Whether the run did not end with an OutOfMemoryError."""
        return self.result.ended != "oom"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All values that were run, in ascending order."""

    plan: RunPlan
    search: SearchRange
    runs: tuple[SearchRun, ...]

    @property
    def best(self) -> SearchRun | None:
        """The run with the largest value that fits, or None if not even the lowest fits."""
        return max((run for run in self.runs if run.fits), key=lambda run: run.value, default=None)

    @property
    def bytes_per_unit(self) -> int | None:
        """Bytes of peak allocated memory per unit of the value; None if fewer than two fit."""
        fitting = [run for run in self.runs if run.fits]
        if len(fitting) < 2:
            return None
        first, last = fitting[0], fitting[-1]
        first_peak = first.result.fullest_device.peak_allocated
        last_peak = last.result.fullest_device.peak_allocated
        return (last_peak - first_peak) // (last.value - first.value)


@dataclass(frozen=True, slots=True)
class RankResult:
    """The run of one rank. error: why there is no verdict."""

    placement: Placement
    result: RunResult
    error: TorchmemError | None

    @property
    def fits(self) -> bool | None:
        """Whether the run did not end with an OutOfMemoryError; None if there is no verdict."""
        return None if self.error else self.result.ended != "oom"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The runs of several ranks, in the requested order."""

    plan: RunPlan
    ranks: tuple[RankResult, ...]

    @property
    def exit_code(self) -> int:
        """1 if a rank does not fit, else 2 if a rank has no verdict, else 0."""
        if any(rank.fits is False for rank in self.ranks):
            return 1
        return next((rank.error.exit_code for rank in self.ranks if rank.error), 0)


def find_batch(plan: RunPlan, search: SearchRange, runner: Runner) -> SearchResult:
    """Find the largest value that fits by bisection, which assumes that larger values need more.

    Raises the error of a run that has no verdict.
    """
    runs: dict[int, SearchRun] = {}

    def fits(value: int) -> bool:
        planned = replace(plan, command=search.command_with(plan.command, value))
        result = runner.run_captured(planned, f"phantom, {search.option} {value}")
        error = no_verdict_error(result)
        if error is not None:
            raise error
        runs[value] = SearchRun(value, result)
        return runs[value].fits

    _bisect(search.low, search.high, fits)
    return SearchResult(plan, search, tuple(runs[value] for value in sorted(runs)))


def sweep(plan: RunPlan, placements: Sequence[Placement], runner: Runner) -> SweepResult:
    """Run each placement. A rank without a verdict does not end the sweep."""
    ranks = []
    for placement in placements:
        label = f"phantom, rank {placement.rank} of {placement.world_size:,}"
        result = runner.run_captured(replace(plan, placement=placement), label)
        ranks.append(RankResult(placement, result, no_verdict_error(result)))
    return SweepResult(plan, tuple(ranks))


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


def _option(command: Sequence[str], name: str) -> str:
    """Return `name` as given if it has dashes or the command has "name=", else "--name"."""
    if name.startswith("-") or any(word.startswith(f"{name}=") for word in command):
        return name
    return f"--{name}"
