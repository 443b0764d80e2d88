"""Compares what torchmem says of a job's end with what is true of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.verdict.kinds import LITTLE, MUCH, PROGRAMS, WORTH, Case
from experiments.verdict.runs import Ended, applied, first_advice, run

from torchmem.explain.call_stack import Frame
from torchmem.explain.oom_report import OomReport

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What torchmem reported for one job, and what is true.

    Attributes:
        kind: the kind's function.
        seed: decides its sizes.
        gpu_gib: memory of the GPU.
        steps: steps, evaluation batches or tokens before the OOM.
        cause: what torchmem says.
        onset: likewise.
        headline: likewise.
        causes: what is true; two where both are.
        exact: what is true if WORTH alone decides, so that never both are because of what was
            measured.
        onsets: likewise.
        expandable: what expandable segments added, as a share of `steps`; None if the job finished.
        setting: the setting that was advised first; None if the first advice is none.
        gained: what that setting added, likewise; None if the job finished.
        line_right: whether the first line named is the guilty one; None for a kind without one.
    """

    kind: str
    seed: int
    gpu_gib: int
    steps: int
    cause: str
    onset: str | None
    headline: str
    causes: tuple[str, ...]
    exact: tuple[str, ...]
    onsets: tuple[str, ...]
    expandable: float | None
    setting: str | None
    gained: float | None
    line_right: bool | None

    @property
    def cause_right(self) -> bool:
        """Whether the cause is a true one."""
        return self.cause in self.causes

    @property
    def onset_right(self) -> bool:
        """Whether the onset is a true one."""
        return self.onset in self.onsets

    @property
    def is_worth(self) -> bool:
        """Whether the setting that was advised first gained WORTH."""
        return self.gained is None or self.gained >= WORTH


def outcome(case: Case) -> Outcome | None:
    """Run a job, alone and with what is advised; None if it does not run out of memory."""
    ended = run(case)
    if ended.report is None:
        return None
    verdict = ended.document["verdict"]
    expandable = run(case, EXPANDABLE).gain(ended)
    variables = applied(first_advice(ended.report))
    gained = expandable if variables == EXPANDABLE else _gained(case, ended, variables)
    return Outcome(
        kind=case.kind.function,
        seed=case.seed,
        gpu_gib=case.gpu_gib,
        steps=ended.progress,
        cause=verdict["cause"],
        onset=verdict["onset"],
        headline=verdict["headline"],
        causes=tuple(sorted(_true_causes(case, expandable, 1 / max(1, ended.progress)))),
        exact=tuple(sorted(_true_causes(case, expandable - WORTH, None))),
        onsets=tuple(sorted(case.kind.onsets)),
        expandable=_finite(expandable),
        setting=", ".join(f"{name}={value}" for name, value in variables.items()) or None,
        gained=_finite(gained),
        line_right=_line_right(case),
    )


def _gained(case: Case, before: Ended, variables: dict[str, str]) -> float:
    return run(case, variables).gain(before) if variables else 0.0


def _finite(share: float) -> float | None:
    return None if share == float("inf") else round(share, 3)


def _true_causes(case: Case, gain: float, one: float | None) -> frozenset[str]:
    """Return the stated causes, with what was measured where it depends on the job.

    `one` is one step, as a share of the steps: few steps measure a gain coarsely. Without it, any
    gain decides.
    """
    stated = case.kind.causes
    low, high = (0.0, 0.0) if one is None else (LITTLE - one, MUCH + one)
    if case.kind.expandable != "any" or gain < low:
        return stated
    return frozenset({"fragmentation"}) if gain >= high else stated | {"fragmentation"}


def _line_right(case: Case) -> bool | None:
    """Return whether a run with history names a guilty line first."""
    if not case.kind.guilty:
        return None
    report = run(case, {"TORCHMEM_HISTORY": "oom"}).report
    frame = _first_line(report, is_leak="leak" in case.kind.onsets) if report else None
    program = str(PROGRAMS / f"{case.kind.program}.py")
    return frame is not None and (frame.file, frame.line) in {
        (program, n) for n in case.kind.guilty
    }


def _first_line(report: OomReport, *, is_leak: bool) -> Frame | None:
    """Return the line that is named first: of what grew or is held, else where it ran out.

    The line at which a leak ran out of memory is not the line that leaks.
    """
    found = report.lines
    use = next(iter((*found.grown, *found.held)), None) if found else None
    if use or is_leak:
        return use.frame if use else None
    return report.origin.own if report.origin else None


@dataclass(frozen=True, slots=True)
class Score:
    """How many jobs were right; pairs are a number, and of how many."""

    jobs: int
    cause: tuple[int, int]
    exact: tuple[int, int]
    onset: tuple[int, int]
    both: tuple[int, int]
    line: tuple[int, int]
    setting: tuple[int, int]
    missed: tuple[int, int]


def score(outcomes: Sequence[Outcome]) -> Score:
    """Return the figures of some jobs."""
    fragmented = [each for each in outcomes if each.causes == ("fragmentation",)]
    return Score(
        jobs=len(outcomes),
        cause=_count(outcomes, lambda each: each.cause_right),
        exact=_count(outcomes, lambda each: each.cause in each.exact),
        onset=_count(outcomes, lambda each: each.onset_right),
        both=_count(outcomes, lambda each: each.cause_right and each.onset_right),
        line=_count(
            (each for each in outcomes if each.line_right is not None),
            lambda each: bool(each.line_right),
        ),
        setting=_count((each for each in outcomes if each.setting), lambda each: each.is_worth),
        missed=_count(fragmented, lambda each: each.cause != "fragmentation"),
    )


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, Score]:
    """Return the figures of each kind."""
    kinds = dict.fromkeys(each.kind for each in outcomes)
    return {kind: score([each for each in outcomes if each.kind == kind]) for kind in kinds}


def rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the outcomes as JSON."""
    return [asdict(each) for each in outcomes]


def _count(outcomes: Iterable[Outcome], is_right: Callable[[Outcome], bool]) -> tuple[int, int]:
    answers = [is_right(each) for each in outcomes]
    return sum(answers), len(answers)
