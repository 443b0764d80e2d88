"""Finds the commit that costs the memory: runs of the script at commits that git chooses.

Git's own bisection does what `git bisect run` does, with the answers of a preflight.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torchmem.preflight.judged_run import JudgedRun
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.runner import Runner
from torchmem.preflight.worktree import Commit, Repository, Worktree, import_path
from torchmem.sample.errors import UsageError

Criterion = Literal["fits", "peak_allocated", "peak_reserved"]
"""What tells a bad commit from a good one: it does not fit, or its peak is nearer to that of the
bad end. Reserved memory counts only if the allocated peaks are the same."""
Answer = Literal["good", "bad", "skip"]
MIN_INCREASE = 0.01
"""Ends whose peaks differ by less have no commit between them that is worth a name."""


@dataclass(frozen=True, slots=True)
class CommitRun(JudgedRun):
    """The run at one commit. answer: for git; "skip" without a verdict."""

    commit: Commit
    answer: Answer


@dataclass(frozen=True, slots=True)
class BisectResult:
    """What was found.

    plan: the run, with the command as given. runs: in the order of history, from the good end to
    the bad one. criterion: None if the two ends take the same memory. found: the commit, or the
    possible ones if others between them had no verdict. parent: the run at the commit before the
    one that was found. has_changes: whether the user's worktree has changes that are not committed.
    """

    plan: RunPlan
    runs: tuple[CommitRun, ...]
    criterion: Criterion | None
    found: tuple[Commit, ...] = ()
    parent: CommitRun | None = None
    has_changes: bool = False

    @property
    def culprit(self) -> CommitRun | None:
        """The run at the commit that costs the memory; None if there is not exactly one."""
        if len(self.found) != 1:
            return None
        return next((run for run in self.runs if run.commit == self.found[0]), None)

    @property
    def exit_code(self) -> int:
        """0 if the commit was found, 1 if the ends take the same memory, else 2."""
        if self.criterion is None:
            return 1
        return 0 if self.culprit else 2


def parse_range(text: str) -> tuple[str, str]:
    """Return the two revisions of "GOOD..BAD"; BAD is HEAD if left out. Raises UsageError."""
    good, dots, bad = text.partition("..")
    if not dots or not good or bad.startswith((".", "-")) or good.startswith("-"):
        raise UsageError(f"--bisect {text[:60]!r} is not a range of commits such as v1.0..HEAD.")
    return good, bad or "HEAD"


def bisect(plan: RunPlan, text: str, runner: Runner, folder: Path) -> BisectResult:
    """Find the commit in a range "GOOD..BAD" that costs the memory.

    folder: where the user is. Raises UsageError if one of the two ends has no verdict, or git
    fails.
    """
    names = parse_range(text)
    repository = Repository(folder)
    good, bad = map(repository.commit, names)
    _check_order(repository, good, bad, names)
    with ExitStack() as stack:
        place = runner.scratch / "worktree"
        worktree = stack.enter_context(repository.worktree(place, good))
        runs = _Runs(_moved(plan, repository, worktree), worktree, repository, runner)
        found = _found(runs, worktree, repository, good, bad)
    return replace(found, plan=plan, has_changes=repository.has_changes())


def _check_order(repository: Repository, good: Commit, bad: Commit, names: tuple[str, str]) -> None:
    if good == bad:
        raise UsageError(f"--bisect: {names[0]} and {names[1]} are the same commit.")
    if repository.is_ancestor(good, bad):
        return
    if repository.is_ancestor(bad, good):
        raise UsageError(
            f"--bisect: {names[1]} is older than {names[0]}: give the good, older commit first."
        )
    raise UsageError(
        f"--bisect: {names[0]} is not in the history of {names[1]}: give a commit that is, such as "
        f"$(git merge-base {names[0]} {names[1]})."
    )


def _moved(plan: RunPlan, repository: Repository, worktree: Worktree) -> RunPlan:
    """Return the plan for the worktree: the same folder of it, and imports from it."""
    path = import_path(plan.command, repository, worktree.root, os.environ)
    variables = () if path is None else (("PYTHONPATH", path),)
    return replace(
        plan,
        command=(_program(plan.command[0], repository), *plan.command[1:]),
        environment=(*plan.environment, *variables),
        folder=worktree.root / repository.prefix,
    )


def _program(word: str, repository: Repository) -> str:
    """Return the program: one that is not of a commit, such as that of a venv, with its path."""
    is_relative = "/" in word and not word.startswith("/")
    return str(Path.cwd() / word) if is_relative and not repository.is_tracked(word) else word


def _found(
    runs: _Runs, worktree: Worktree, repository: Repository, good: Commit, bad: Commit
) -> BisectResult:
    ends = runs.end(good, "good"), runs.end(bad, "bad")
    judge = _judge(*ends)
    if judge is None:
        return BisectResult(runs.plan, ends, None)
    worktree.start(good, bad)
    while not (hashes := worktree.found()):
        worktree.mark(runs.run(repository.commit(worktree.current()), judge.answer).answer)
    found = tuple(map(repository.commit, hashes))
    tested = runs.in_order(repository.commits_between(good, bad))
    before = repository.parent(found[0]) if len(found) == 1 else None
    parent = next((run for run in tested if run.commit == before), None)
    return BisectResult(runs.plan, tested, judge.criterion, found, parent)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Tells bad commits from good ones. limit: bytes above which a peak is bad."""

    criterion: Criterion
    limit: int = 0

    def answer(self, result: RunResult) -> Answer:
        fits = JudgedRun(result).fits
        if fits is None:
            return "skip"
        is_more = self.criterion != "fits" and peak(result, self.criterion) > self.limit
        return "good" if fits and not is_more else "bad"


def _judge(good: CommitRun, bad: CommitRun) -> _Judge | None:
    """Return what tells the two ends apart; None if nothing does."""
    if not bad.fits:
        return _Judge("fits")
    criteria: tuple[Criterion, ...] = ("peak_allocated", "peak_reserved")
    for criterion in criteria:
        low, high = peak(good.result, criterion), peak(bad.result, criterion)
        if high > low * (1 + MIN_INCREASE):
            return _Judge(criterion, (low + high) // 2)
    return None


def peak(result: RunResult, criterion: Criterion | None) -> int:
    """Return the peak that a criterion compares, on the fullest GPU."""
    device = result.fullest_device
    return device.peak_reserved if criterion == "peak_reserved" else device.peak_allocated


class _Runs:
    """Runs the script at commits, each at most once."""

    def __init__(
        self, plan: RunPlan, worktree: Worktree, repository: Repository, runner: Runner
    ) -> None:
        self.plan = plan
        self._worktree = worktree
        self._repository = repository
        self._runner = runner
        self._runs: dict[str, CommitRun] = {}

    def end(self, commit: Commit, answer: Answer) -> CommitRun:
        """Run one end of the range. Raises UsageError if it has no verdict, or nothing to find."""
        found = self.run(commit, lambda _: answer)
        if found.error is not None:
            raise UsageError(
                f"--bisect: at {commit.short} {str(found.error).rstrip('.')} (it runs in a "
                "worktree of its own, without files that git does not track: name data by "
                "absolute paths)."
            )
        if answer == "good" and not found.fits:
            raise UsageError(
                f"--bisect: the script does not fit at {commit.short} either: choose an older "
                "commit, or a larger --gpu-model."
            )
        return found

    def run(self, commit: Commit, answer: Callable[[RunResult], Answer]) -> CommitRun:
        """Run the script at a commit, unless it was."""
        if commit.hash not in self._runs:
            self._worktree.check_out(commit)
            self._check_folder(commit)
            label = f"phantom, {commit.short} {commit.subject[:40]}"
            result = self._runner.run_captured(self.plan, label)
            self._runs[commit.hash] = CommitRun(result, commit, answer(result))
        return self._runs[commit.hash]

    def in_order(self, hashes: list[str]) -> tuple[CommitRun, ...]:
        """Return the runs in the order of history; the one before these commits comes first."""
        order = {name: number for number, name in enumerate(hashes)}
        return tuple(sorted(self._runs.values(), key=lambda run: order.get(run.commit.hash, -1)))

    def _check_folder(self, commit: Commit) -> None:
        if self.plan.folder is not None and not self.plan.folder.is_dir():
            raise UsageError(
                f"--bisect: {self._repository.prefix} does not exist at {commit.short}: start it "
                "in a folder that all the commits have."
            )
