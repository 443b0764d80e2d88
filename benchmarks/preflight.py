"""What a preflight costs the machine it runs on, for decoders from 0.1 to 70 billion parameters.

    python -m benchmarks.preflight                      # about ten minutes; needs the CUDA build of torch, no GPU
    python -m benchmarks.preflight --sizes 7B --steps 50

Each size is trained in bf16 with AdamW, 2,048 tokens a step, on one card of 2 TB (no such card is sold); two of them
also as rank 0 of 1,024 with FSDP2 on a card of 80 GB. `bare` is the same run by `python -m torchmem.phantom`, which
records nothing. Every figure comes from a process of its own. Seconds are CPU seconds of all threads, which other load
disturbs little, but for `wall`. Set-up is import, model and first step; a step is the median of the others; the end is
when the trace is written.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.decoder.shapes import SHAPES

from torchmem.allocator.sizes import GIB, MIB
from torchmem.phantom.cards import parse_card
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.run import run
from torchmem.recording import read

ROOT = Path(__file__).resolve().parents[1]
ONE_CARD, CARD_OF_MANY = "2000GB", "80GB"
SHARDED = ("7B", "70B")
RANK = Placement(rank=0, world_size=1024, local_world_size=8)
COLUMNS = (
    "parameters", "placement", "peak reserved", "events a step", "set-up", "a step", "bare", "the end", "wall",
    "RAM in training", "bare", "RAM at most",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of the parts of a run and wall seconds of the whole; bytes of RAM after the last step and at most."""

    setup: float
    step: float
    end: float
    wall: float
    resident: int
    most: int
    last: dict[str, Any]


def measured(run_it: Callable[[], object], readings: Path) -> Cost:
    """The cost of one run in a process that writes its readings to this file."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run_it()
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = [json.loads(line) for line in readings.read_text().splitlines()]
    cpu = [reading["cpu"] for reading in found[1:]]
    step = statistics.median(later - earlier for earlier, later in pairwise(cpu))
    return Cost(
        cpu[0], step, whole - cpu[-1], wall, found[-1]["resident"], after.ru_maxrss << 10, found[-1]
    )


def command(size: str, steps: int, readings: Path) -> tuple[str, ...]:
    """The training script; it never ends by itself before a preflight stops it."""
    flags = ("--readings", str(readings), "--steps", str(steps))
    return (sys.executable, "-W", "ignore", "-m", "benchmarks.decoder.train", size, *flags)


def bare(folder: Path, size: str, steps: int) -> Cost:
    """On a phantom card and nothing else."""
    readings = folder / "bare"
    phantom = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--memory",
        ONE_CARD,
        "--state",
        str(folder / "cards"),
        "--",
    ]
    return measured(
        lambda: subprocess.run([*phantom, *command(size, steps, readings)], check=True), readings
    )


def row(size: str, steps: int, placement: Placement | None) -> str:
    """One line of the table; in a process of its own, so that the most RAM of its children is that of this run."""
    with tempfile.TemporaryDirectory() as folder:
        return _row(Path(folder), size, steps, placement)


def _row(folder: Path, size: str, steps: int, placement: Placement | None) -> str:
    readings, scratch = folder / "readings", folder / "preflight"
    scratch.mkdir()
    memory = parse_card(CARD_OF_MANY if placement else ONE_CARD)
    plan = RunPlan(
        command(size, steps + 1, readings),
        memory,
        8 if placement else 1,
        steps,
        placement=placement,
    )
    outcomes = []
    cost = measured(lambda: outcomes.append(run(plan, scratch, lambda _: None)), readings)
    (outcome,) = outcomes
    # Afterwards, so that the most RAM above is the preflight's.
    alone = None if placement else bare(folder, size, steps)
    assert outcome.snapshot is not None, outcome
    events = len(read(outcome.snapshot)[0].events) / steps
    return _cells(
        f"{cost.last['parameters'] / 1e9:.2f} B",
        f"rank {placement.rank} of {placement.world_size:,}" if placement else "one card",
        f"{outcome.devices[0].peak_reserved / GIB:,.1f} GiB",
        f"{events:,.0f}",
        f"{cost.setup:.1f} s",
        f"{cost.step:.3f} s",
        f"{alone.step:.3f} s" if alone else "",
        f"{cost.end:.1f} s",
        f"{cost.wall:.1f} s",
        f"{cost.resident / MIB:,.0f} MiB",
        f"{alone.resident / MIB:,.0f} MiB" if alone else "",
        f"{cost.most / MIB:,.0f} MiB",
    )


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print, one row for each size and placement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SIZE")
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps of a run (default: %(default)s)"
    )
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(_cells(*COLUMNS), _cells(*["---"] * len(COLUMNS)), sep="\n")
    runs: list[tuple[str, Placement | None]] = [(size, None) for size in arguments.sizes]
    runs += [(size, RANK) for size in arguments.sizes if size in SHARDED]
    for size, placement in runs:
        with get_context("spawn").Pool(1) as one:
            print(one.apply(row, (size, arguments.steps, placement)), flush=True)


if __name__ == "__main__":
    main()
