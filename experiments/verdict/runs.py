"""Runs a job on PyTorch's real allocator, and reads what torchmem says of its end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.verdict.kinds import Case
from support.phantom import run_on_phantom

from torchmem.explain.oom_report import OomReport, decode
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy
from torchmem.sample.run_directory import REPORT_SUFFIX

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = """
import sys
sys.path.insert(0, {root!r})
from experiments.verdict.programs.job import Done, Job
from experiments.verdict.programs.{program} import {function} as run
job = Job({function!r}, {seed})
try:
    run(job)
except Done:
    pass
finally:
    print(job.progress, job.total)
"""
LEAST_STEPS = 10
"""A job that ran out of memory at once is cured if it takes as many steps."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    Attributes:
        progress: the steps, evaluation batches or tokens that it had done, since it did something
            new.
        total: the same, since it began.
        report: the report; None if the job finished.
        document: what `torchmem why --json` prints.
        text: what the job wrote to stderr.
    """

    progress: int
    total: int
    report: OomReport | None
    document: dict[str, Any]
    text: str = ""

    @property
    def twice(self) -> int:
        """The steps after which it would have lasted twice as long."""
        return self.total + max(self.progress, LEAST_STEPS)

    def gain(self, before: Ended) -> float:
        """Return what this run did more than another of the same job, as a share of that."""
        if self.report is None:
            return math.inf
        more = self.progress - before.progress
        return more / before.progress if before.progress else math.inf if more > 0 else 0.0


def program(case: Case) -> str:
    """Return the Python program of a job."""
    kind = case.kind
    return LAUNCH.format(
        root=str(ROOT), program=kind.program, function=kind.function, seed=case.seed
    )


def run(case: Case, variables: Mapping[str, str] | None = None) -> Ended:
    """Run a job to its end, with these environment variables added."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHMEM_RUN_DIR": f"{folder}/run", "PHANTOM_STATE_DIR": f"{folder}/gpu"}
        done = run_on_phantom(
            "-c",
            program(case),
            memory=f"{case.gpu_gib}GiB",
            environment={**own, **_ranks(case), **(variables or {})},
        )
        return ended(case, done, Path(folder))


def again(case: Case, before: Ended, variables: Mapping[str, str]) -> float:
    """Run a job for at most twice as long, with these variables; return its gain."""
    return run(case, {"VERDICT_STEPS": str(before.twice), **variables}).gain(before)


def _ranks(case: Case) -> dict[str, str]:
    ranks = case.kind.ranks
    return {"RANK": "0", "WORLD_SIZE": str(ranks)} if ranks > 1 else {}


def ended(case: Case, done: subprocess.CompletedProcess[str], folder: Path) -> Ended:
    """Return how a process ended, with the report that it wrote below `folder`."""
    progress, total = map(int, done.stdout.split()[-2:]) if done.stdout else (0, 0)
    if done.returncode == 0:
        return Ended(progress, total, None, {})
    if "OutOfMemoryError" not in done.stderr:
        raise RuntimeError(f"{case.name}: {done.stderr}")
    path = max(folder.rglob(f"*{REPORT_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    return Ended(progress, total, decode(path.read_bytes()), _document(path), done.stderr)


def _document(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torchmem.cli", "why", "--json", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    document: dict[str, Any] = json.loads(printed)
    return document


def first_advice(report: OomReport) -> Remedy | None:
    """Return what the report advises first."""
    return next(iter(remedies(report)), None)
