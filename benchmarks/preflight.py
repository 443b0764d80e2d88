"""Time and RAM of a preflight, for decoders from 0.1 to 70 billion parameters.

    python -m benchmarks.preflight    # about ten minutes; needs the CUDA build of torch, but no GPU
    python -m benchmarks.preflight --sizes 7B --steps 50

Each size is trained in bf16 with AdamW, 2,048 tokens per step, on a fictitious GPU of 2 TB; two of
them also as rank 0 of 1,024 with FSDP2 on a GPU of 80 GB. `bare` is the same run with
`python -m torchmem.phantom`, which records nothing. Each figure comes from a separate process.
Seconds, except `wall`, are CPU seconds of all threads, which depend little on other load. Setup is
import, model and first step; a step is the median of the others; exit includes writing the trace.
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
from torchmem.phantom.gpus import parse_gpu_model
from torchmem.preflight.plan import Placement, RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.run import run
from torchmem.trace import read

ROOT = Path(__file__).resolve().parents[1]
ONE_GPU, GPU_OF_MANY = "2000GB", "80GB"
SHARDED = ("7B", "70B")
RANK = Placement(rank=0, world_size=1024, local_world_size=8)
COLUMNS = (
    "parameters",
    "placement",
    "peak reserved",
    "events per step",
    "setup",
    "step",
    "bare",
    "exit",
    "wall",
    "RAM in training",
    "bare",
    "peak RAM",
)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of the parts of a run, its wall seconds, and its RAM in bytes.

    resident: after the last step. peak: highest value. last: the last reading.
    """

    setup: float
    step: float
    exit: float
    wall: float
    resident: int
    peak: int
    last: dict[str, Any]


def measure(run_it: Callable[[], object], readings: Path) -> Cost:
    """Return the cost of one run, whose process writes its readings to this file."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run_it()
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    values = [json.loads(line) for line in readings.read_text().splitlines()]
    cpu = [reading["cpu"] for reading in values[1:]]
    step = statistics.median(later - earlier for earlier, later in pairwise(cpu))
    return Cost(
        cpu[0],
        step,
        whole - cpu[-1],
        wall,
        values[-1]["resident"],
        after.ru_maxrss << 10,
        values[-1],
    )


def command(size: str, steps: int, readings: Path) -> tuple[str, ...]:
    """Return the command of the training script, which runs until the preflight stops it."""
    flags = ("--readings", str(readings), "--steps", str(steps))
    return (sys.executable, "-W", "ignore", "-m", "benchmarks.decoder.train", size, *flags)


def measure_bare(folder: Path, size: str, steps: int) -> Cost:
    """Measure the script on a phantom GPU without a preflight."""
    readings = folder / "bare"
    phantom = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--memory",
        ONE_GPU,
        "--state",
        str(folder / "gpus"),
        "--",
    ]
    return measure(
        lambda: subprocess.run([*phantom, *command(size, steps, readings)], check=True), readings
    )


def row(size: str, steps: int, placement: Placement | None) -> str:
    """Return one line of the table. Call it in a new process, whose children are this run only."""
    with tempfile.TemporaryDirectory() as folder:
        return _row(Path(folder), size, steps, placement)


def _row(folder: Path, size: str, steps: int, placement: Placement | None) -> str:
    readings, scratch = folder / "readings", folder / "preflight"
    scratch.mkdir()
    memory = parse_gpu_model(GPU_OF_MANY if placement else ONE_GPU)
    plan = RunPlan(
        command(size, steps + 1, readings),
        memory,
        8 if placement else 1,
        steps,
        placement=placement,
    )
    results: list[RunResult] = []
    cost = measure(lambda: results.append(run(plan, scratch, lambda _: None)), readings)
    (result,) = results
    # Last, so that the peak RAM above is that of the preflight.
    alone = None if placement else measure_bare(folder, size, steps)
    assert result.snapshot is not None, result
    events = len(read(result.snapshot)[0].events) / steps
    return _cells(
        f"{cost.last['parameters'] / 1e9:.2f} B",
        f"rank {placement.rank} of {placement.world_size:,}" if placement else "one GPU",
        f"{result.devices[0].peak_reserved / GIB:,.1f} GiB",
        f"{events:,.0f}",
        f"{cost.setup:.1f} s",
        f"{cost.step:.3f} s",
        f"{alone.step:.3f} s" if alone else "",
        f"{cost.exit:.1f} s",
        f"{cost.wall:.1f} s",
        f"{cost.resident / MIB:,.0f} MiB",
        f"{alone.resident / MIB:,.0f} MiB" if alone else "",
        f"{cost.peak / MIB:,.0f} MiB",
    )


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print one row for each size and placement."""
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
        with get_context("spawn").Pool(1) as pool:
            print(pool.apply(row, (size, arguments.steps, placement)), flush=True)


if __name__ == "__main__":
    main()
