"""Run public example scripts with and without `torchmem run`, on phantom GPUs:

    git clone https://github.com/pytorch/examples CHECKOUTS/examples    # and the others of cases.py
    python -m experiments.example_scripts --checkouts CHECKOUTS

Needs the CUDA build of PyTorch and what the scripts import (torchvision, timm, lightning), but no
GPU and no network: the data are made up. The scripts are copied and not changed. Nothing is
computed on a phantom GPU, so losses mean nothing; the programs, their processes, allocations and
optimizer steps are real. Prints a row of a Markdown table for each script. The output is compared
without its numbers and its order: losses, times, and ranks that print first.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.example_scripts.cases import CASES, Case
from prometheus_client.parser import text_string_to_metric_families

from torchmem.allocator.sizes import format_size
from torchmem.metrics import catalog

GPU = "h100-80gb"
TIMEOUT_SECONDS = 600
HEAD = (
    "| script | arguments | exit code | output | ranks | steps | peak of each rank | ended as |",
    "|---|---|---|---|---|---|---|---|",
)
_NUMBER = re.compile(r"nan|inf|[-+]?\d[\d.,:e+-]*")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a script left behind; `lines` is its stdout."""

    code: int
    lines: list[str]
    errors: list[str]
    page: str = ""

    @property
    def shape(self) -> list[str]:
        """The lines of its output without numbers, sorted, as ranks print in any order."""
        return sorted(_NUMBER.sub("N", line) for line in self.lines)


def main() -> None:
    """Run the cases and print the table; with --logs, keep the output of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the checkouts")
    parser.add_argument("--only", default="", help="only scripts whose name contains this")
    parser.add_argument("--logs", type=Path, help="folder for the output of each run")
    arguments = parser.parse_args()
    print("\n".join(HEAD))
    for number, case in enumerate(CASES):
        if arguments.only in case.name:
            logs = arguments.logs / str(number) if arguments.logs else None
            print(row(case, arguments.checkouts.resolve(), logs), flush=True)


def row(case: Case, checkouts: Path, logs: Path | None) -> str:
    """Run a case without and with `torchmem run`, and return its row."""
    plain, monitored = (run(case, checkouts, monitor=on) for on in (False, True))
    if logs:
        _keep(logs, plain, monitored)
    same_code = plain.code == monitored.code
    cells = (
        case.name,
        " ".join((*case.launcher[1:2], *case.arguments)),
        f"{plain.code}" if same_code else f"{plain.code}, with torchmem {monitored.code}",
        "equal" if plain.shape == monitored.shape else "differs",
        *published(monitored.page),
    )
    return f"| {' | '.join(cells)} |"


def run(case: Case, checkouts: Path, *, monitor: bool) -> Outcome:
    """Run a script once, in a new copy of its checkout with its data."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, state = Path(scratch) / case.repository, Path(scratch) / "state"
        state.mkdir()
        shutil.copytree(checkouts / case.repository, copy)
        for make, folder in case.data:
            make(copy / folder)
        command = [
            *_phantom(state, case.gpus),
            *(_monitor(state) if monitor else ()),
            sys.executable,
        ]
        script = copy / case.script
        done = subprocess.run(
            [*command, *case.launcher, script.name, *case.arguments],
            cwd=script.parent,
            env=os.environ | {"TORCH_HOME": str(copy / "torch_home"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        page = _scrape(state) if monitor else ""
    return Outcome(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), page)


def published(page: str) -> Iterator[str]:
    """Yield what the exporter shows of a job: ranks, and by rank its steps, peak and end."""
    found: dict[str, dict[str, float]] = {}
    states: dict[str, str] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            pid = sample.labels.get("pid", "")
            if sample.name == catalog.PROCESS_STATE.name and sample.value:
                states[pid] = sample.labels["state"]
            elif pid:
                values = found.setdefault(sample.name, {})
                values[pid] = values.get(pid, 0) + sample.value
    steps = found.get(catalog.STEPS.name, {})
    peaks = found.get(catalog.ALLOCATED_PEAK.name, {})
    yield str(len(states))
    yield _each(f"{value:.0f}" for value in steps.values())
    yield _each(format_size(int(value)) for value in peaks.values())
    yield _each(states.values())


def _each(values: object) -> str:
    return ", ".join(sorted(set(values)))  # type: ignore[call-overload]


def _phantom(state: Path, gpus: int) -> list[str]:
    flags = ["--gpu-model", GPU, "--gpus", str(gpus), "--state", str(state / "gpus")]
    return [sys.executable, "-m", "torchmem.phantom", *flags, "--"]


def _monitor(state: Path) -> list[str]:
    run_dir = state / "run"
    return [sys.executable, "-m", "torchmem.cli", "run", "--run-dir", str(run_dir), "--"]


def _scrape(state: Path) -> str:
    """Return the exporter's page after the job."""
    command = [sys.executable, "-m", "torchmem.cli", "exporter", "--once"]
    done = subprocess.run(
        [*command, "--run-dir", str(state / "run")], capture_output=True, text=True, check=True
    )
    return done.stdout


def _keep(folder: Path, plain: Outcome, monitored: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, outcome in (("plain", plain), ("monitored", monitored)):
        text = "\n".join([*outcome.lines, "-- stderr --", *outcome.errors, outcome.page])
        (folder / f"{name}.log").write_text(text)


if __name__ == "__main__":
    main()
