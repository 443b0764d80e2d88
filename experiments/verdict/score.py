"""Compares what torchmem says of a job's end with what is true of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.verdict.cures import followed
from experiments.verdict.kinds import LITTLE, MUCH, PROGRAMS, UNKNOWN, WORTH, Case
from experiments.verdict.runs import again, first_advice, run

from torchmem.explain.call_stack import Frame
from torchmem.explain.oom_report import OomReport

CURED = 1.0
"""The share of additional steps from which advice is the cure: the job lasts twice as long."""
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
        onset: likewise; UNKNOWN where nothing is said.
        headline: likewise.
        advice: the first.
        causes: what is true; two where both are.
        exact: what is true if WORTH alone decides, so that never both are because of what was
            measured.
        onsets: likewise.
        expandable: what expandable segments added, as a share of `steps`; None if the job finished
            or lasted twice as long, or if the true cause does not depend on it.
        followed: how the first advice was followed, as settings of the job; "" without advice.
        gained: what that added, likewise.
        line_right: whether the first line named is the guilty one; None for a kind without one.
    """

    kind: str
    seed: int
    gpu_gib: int
    steps: int
    cause: str
    onset: str
    headline: str
    advice: str
    causes: tuple[str, ...]
    exact: tuple[str, ...]
    onsets: tuple[str, ...]
    expandable: float | None
    followed: str
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
    def is_setting(self) -> bool:
        """Whether the first advice is a setting, and no change of the script."""
        return bool(self.followed) and "VERDICT_CURE" not in self.followed

    @property
    def is_worth(self) -> bool:
        """Whether what was advised first gained WORTH."""
        return self.gained is None or self.gained >= WORTH

    @property
    def is_cured(self) -> bool:
        """Whether the job finishes or lasts twice as long with what was advised first."""
        return self.gained is None or self.gained >= CURED


def outcome(case: Case) -> Outcome | None:
    """Run a job, alone and with what is advised; None if it does not run out of memory."""
    ended = run(case)
    if ended.report is None:
        return None
    verdict = ended.document
    remedy = first_advice(ended.report)
    variables = followed(remedy)
    is_measured = case.kind.expandable == "any" or variables == EXPANDABLE
    expandable = again(case, ended, EXPANDABLE) if is_measured else math.inf
    gained = again(case, ended, variables) if variables not in ({}, EXPANDABLE) else expandable
    return Outcome(
        kind=case.kind.function,
        seed=case.seed,
        gpu_gib=case.gpu_gib,
        steps=ended.progress,
        cause=verdict["cause"],
        onset=verdict["onset"] or UNKNOWN,
        headline=verdict["headline"],
        advice=remedy.text if remedy else "",
        causes=tuple(sorted(_true_causes(case, expandable, 1 / max(1, ended.progress)))),
        exact=tuple(sorted(_true_causes(case, expandable - WORTH, None))),
        onsets=tuple(sorted(case.kind.onsets)),
        expandable=_finite(expandable),
        followed=", ".join(f"{name}={value}" for name, value in variables.items()),
        gained=_finite(gained) if variables else 0.0,
        line_right=_line_right(case),
    )


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
    cure: tuple[int, int]
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
        cure=_count(outcomes, lambda each: each.is_cured),
        setting=_count((each for each in outcomes if each.is_setting), lambda each: each.is_worth),
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
