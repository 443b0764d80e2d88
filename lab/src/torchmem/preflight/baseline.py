"""Saves what a preflight needs as a baseline, and compares with one.

The script runs again if that is in doubt: when a baseline is saved, and when it needs more.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import PurePath
from typing import Any

from torchmem.compare import baseline as files
from torchmem.compare import markdown
from torchmem.compare.baseline import BaselineEntry, BaselineOptions, Compared
from torchmem.compare.peak_lines import change_lines, headline
from torchmem.compare.peak_memory import peak_values
from torchmem.output.terminal import wrapped
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.runner import Runner
from torchmem.sample.errors import UsageError

MORE_RUNS = 2
"""Runs that tell growth from variation."""
_PYTHON = re.compile(r"python[\d.]*t?")  # t: the free-threaded build
_TABLES = ("find_batch", "matrix")
_FLAGS = ("save_baseline", "baseline", "tolerance", "markdown")


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """The runs compared with the baseline; `problem` is why some have no verdict."""

    compared: tuple[Compared, ...] = ()
    problem: str | None = None

    @property
    def exit_code(self) -> int:
        """1 if a run needs more, 2 if one could not be compared, else 0."""
        if self.problem is None and any(each.outcome == "more" for each in self.compared):
            return 1
        unknown = any(each.outcome in {"new", "other"} for each in self.compared)
        return 2 if self.problem or unknown else 0

    def lines(self) -> Iterator[str]:
        """Yield what the comparison says, as text."""
        for each in self.compared:
            grown = headline(each.diff) if each.diff and each.outcome == "more" else None
            yield from wrapped(f"Baseline: {each.sentence}" + (f" {grown}." if grown else ""))
            if each.diff and each.outcome in {"more", "less"}:
                yield from change_lines(each.diff)
        if self.problem:
            yield from wrapped(f"Baseline: {self.problem}")

    def values(self) -> dict[str, Any]:
        """Return what the comparison says, for JSON."""
        rows = [
            {
                "name": each.name,
                "outcome": each.outcome,
                "sentence": each.sentence,
                "before": peak_values(each.diff.before) if each.diff else None,
                "after": peak_values(each.entry.memory),
                "largest_growth": headline(each.diff) if each.diff else None,
            }
            for each in self.compared
        ]
        return {"exit_code": self.exit_code, "problem": self.problem, "compared": rows}


def checked_options(arguments: argparse.Namespace) -> BaselineOptions | None:
    """Return the checked flags, None if there are none. Raises UsageError."""
    given = [name for name in _FLAGS if getattr(arguments, name)]
    if not given:
        return None
    table = next((name for name in _TABLES if getattr(arguments, name)), None)
    if table:
        raise UsageError(
            f"--{given[0].replace('_', '-')} compares single runs: do not combine it with "
            f"--{table.replace('_', '-')}."
        )
    if not (arguments.save_baseline or arguments.baseline):
        raise UsageError(f"--{given[0]} needs a baseline: add --baseline FILE.")
    return BaselineOptions.checked(
        arguments.save_baseline, arguments.baseline, arguments.tolerance or "", arguments.markdown
    )


def check(
    options: BaselineOptions, plan: RunPlan, result: RunResult, runner: Runner
) -> BaselineResult:
    """Compare a run with the baseline, and save it as one, as the flags say."""
    found = entries(plan, result)
    compared = options.compare(found)
    grown = {each.name: each for each in compared if each.outcome == "more"}
    problems: list[str] = []
    if not found:
        problems.append(f"{run_name(plan)} has no peak to compare, because it did not fit.")
    elif grown:
        more = {name: found[name] for name in grown}
        accepted = {name: _accepted(each, options.tolerance) for name, each in grown.items()}
        again = _again(plan, runner, MORE_RUNS)
        problems += _variation(more, again, options.tolerance, accepted)
    elif not options.baseline:
        problems += _variation(found, _again(plan, runner, 1), options.tolerance, {})
    if options.save and found:
        files.save(options.save, found)
        print(f"torchmem: saved {len(found)} in {options.save}.", file=sys.stderr)
    if options.markdown:
        markdown.write(options.markdown, markdown.page(compared, phantom=True))
    return BaselineResult(tuple(compared), " ".join(problems) or None)


def entries(plan: RunPlan, result: RunResult) -> dict[str, BaselineEntry]:
    """Return what a run needed, by its name and, if there are several, by GPU."""
    if result.ended == "oom" or result.error:
        return {}
    devices = {device.device: device.memory for device in result.devices}
    return files.entries(run_name(plan), devices, plan.gpu.name, result.torch_version)


def run_name(plan: RunPlan) -> str:
    """Return the command, the same on all machines, with the rank of a distributed run."""
    program = PurePath(plan.command[0]).name
    words = "python" if _PYTHON.fullmatch(program) else program, *plan.command[1:]
    place = plan.placement
    rank = f" as rank {place.rank} of {place.world_size}" if place else ""
    return shlex.join(words) + rank


def _accepted(compared: Compared, tolerance: float) -> float:
    before = compared.diff.before.peak_allocated if compared.diff else None
    return (before or 0) * (1 + tolerance)


def _again(plan: RunPlan, runner: Runner, times: int) -> list[dict[str, BaselineEntry]]:
    return [
        entries(plan, runner.run_captured(plan, "again, to see whether the peak varies"))
        for _ in range(times)
    ]


def _variation(
    found: Mapping[str, BaselineEntry],
    again: Sequence[Mapping[str, BaselineEntry]],
    tolerance: float,
    accepted: Mapping[str, float],
) -> list[str]:
    """Return by how much peaks vary between runs; of those that need more, if not all runs do."""
    problems = []
    for name, entry in found.items():
        peaks = [
            each[name].memory.peak_allocated or 0
            for each in ({name: entry}, *again)
            if name in each
        ]
        varies = files.variation(peaks, tolerance)
        if varies and min(peaks) <= accepted.get(name, inf):
            problems.append(varies)
    return problems
