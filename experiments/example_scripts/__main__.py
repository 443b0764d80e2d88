"""Run public example scripts with and without `torchmem run`, on phantom GPUs:

    git clone https://github.com/pytorch/examples CHECKOUTS/examples    # and the others of cases.py
    python -m experiments.example_scripts --checkouts CHECKOUTS

Needs the CUDA build of PyTorch and what the scripts import (torchvision, timm, lightning), but no
GPU and no network: the data are made up. The scripts are copied and not changed. Nothing is
computed on a phantom GPU, so losses mean nothing; the programs, their processes, allocations and
optimizer steps are real. Prints a row of a Markdown table for each script.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.example_scripts.cases import CASES, Case
from experiments.monitored_runs import PLAIN, RUN, Command, Outcome, published

from torchmem.allocator.sizes import format_size

HEAD = (
    "| script | arguments | exit code | output | ranks | steps | peak of each rank | ended as |",
    "|---|---|---|---|---|---|---|---|",
)


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
    plain, monitored = (run(case, checkouts, way) for way in (PLAIN, RUN))
    if logs:
        _keep(logs, plain, monitored)
    same_code = plain.code == monitored.code
    cells = (
        case.name,
        " ".join((*case.launcher[1:2], *case.arguments)),
        f"{plain.code}" if same_code else f"{plain.code}, with torchmem {monitored.code}",
        "equal" if plain.shape == monitored.shape else "differs",
        *cells_of(monitored.page),
    )
    return f"| {' | '.join(cells)} |"


def run(case: Case, checkouts: Path, way: str) -> Outcome:
    """Run a script once, in a new copy of its checkout with its data."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, state = Path(scratch) / case.repository, Path(scratch) / "state"
        state.mkdir()
        shutil.copytree(checkouts / case.repository, copy)
        for make, folder in case.data:
            make(copy / folder)
        script = copy / case.script
        words = [sys.executable, *case.launcher, script.name, *case.arguments]
        offline = {"TORCH_HOME": str(copy / "torch_home"), "HF_HUB_OFFLINE": "1"}
        command = Command(words, script.parent, sys.executable, case.gpus, environment=offline)
        return command.run(way, state)


def cells_of(page: str) -> Iterator[str]:
    """Yield what the exporter shows of a job: ranks, and by rank its steps, peak and end."""
    ranks = published(page)
    yield str(len(ranks))
    yield _each(str(rank.steps) for rank in ranks if rank.steps is not None)
    yield _each(format_size(rank.peak_bytes) for rank in ranks if rank.peak_bytes is not None)
    yield _each(rank.state for rank in ranks)


def _each(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _keep(folder: Path, plain: Outcome, monitored: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, outcome in (("plain", plain), ("monitored", monitored)):
        text = "\n".join([*outcome.lines, "-- stderr --", *outcome.errors, outcome.page])
        (folder / f"{name}.log").write_text(text)


if __name__ == "__main__":
    main()
