"""What the setting `release` does for two processes whose phases alternate on one card.

Two processes train the same network in turns: one has large batches while the other has small ones,
and after some steps they change places. The card cannot hold the large phases of both, nor the
large phase of one beside the cache that the other kept. A step that runs out of memory is counted
and skipped, and training goes on.

    # On the phantom GPU nothing is computed, so that only the counts matter.
    python -m torchmem.phantom --memory 16GB -- python benchmarks/release.py
    python benchmarks/release.py    # on a GPU

Runs: `release` off, each tier of it, and `torch.cuda.empty_cache()` after every step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from torchmem import sdk

WIDTH, LAYERS, PROCESSES = 4096, 8, 2
LARGE_SHARE, SMALL_SHARE = 0.55, 0.08
# Activations kept for each sample: input and output of the linear layer and of the ReLU, in fp32.
BYTES_PER_SAMPLE = 2 * LAYERS * WIDTH * 4
TIERS = {
    "gradual": "gradual=0.5",
    "cache": "cache=0.5",
    "emergency": "emergency",
    "neighbors": "neighbors",
}
MODES = ("off", *TIERS, "empty_cache")


@dataclass
class Result:
    """The result of one process.

    `utilization` is the mean share of the card that finished steps used at their peak.
    """

    steps: int = 0
    ooms: int = 0
    utilization: float = 0.0
    retries: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    releases: int = 0
    released_gib: float = 0.0
    waited: int = 0
    wait_seconds: float = 0.0
    release_seconds: float = 0.0
    seconds: float = 0.0


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """Run one training step on random data."""
    model(torch.randn(batch, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()


def batches(index: int, phases: int, length: int, total: int) -> list[int]:
    """Return the batch size of every step: large in every second phase, varied by a few percent."""
    sizes = []
    for number in range(phases * length):
        large = (number // length + index) % PROCESSES == 0
        share = (LARGE_SHARE if large else SMALL_SHARE) * (1 - 0.01 * (number % 7))
        sizes.append(int(share * total / BYTES_PER_SAMPLE))
    return sizes


def train(
    index: int, mode: str, arguments: argparse.Namespace, barrier: Barrier, results: Any
) -> None:
    """Train in one process; the barrier keeps both at the same step."""
    session = sdk.instrument(
        rank=index, interval=1e-6, release=TIERS.get(mode), release_interval=1e-6
    )
    model = torch.nn.Sequential(
        *(m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))
    )
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    result, started = Result(), time.perf_counter()
    total, slots = torch.cuda.mem_get_info()[1], arguments.phases * arguments.length
    previous = 0
    for batch in batches(index, arguments.phases, arguments.length, total):
        if mode == "neighbors" and batch > 2 * previous:
            result.waited += 1
            session.wait_for_memory(int(1.25 * batch * BYTES_PER_SAMPLE))
        previous = batch
        with session.idle():
            barrier.wait(300)
        torch.cuda.reset_peak_memory_stats()
        try:
            step(model, optimizer, batch)
            result.steps += 1
            result.utilization += torch.cuda.max_memory_allocated() / total / slots
        except torch.OutOfMemoryError:
            result.ooms += 1
            optimizer.zero_grad()
        if mode == "empty_cache":
            torch.cuda.empty_cache()
    result.seconds = time.perf_counter() - started
    session.close()
    count(result)
    results.put(result)


def count(result: Result) -> None:
    """Fill in PyTorch's counters, and torchmem's from its last sample."""
    stats = torch.cuda.memory_stats()
    result.retries = stats["num_alloc_retries"]
    result.device_allocs, result.device_frees = stats["num_device_alloc"], stats["num_device_free"]
    (sample,) = Path(os.environ["TORCHMEM_RUN_DIR"]).rglob(f"*-{os.getpid()}-*.sample.json")
    device = json.loads(sample.read_bytes())["devices"][0]
    tiers = device["releases"].values()
    result.wait_seconds = device["counters"]["wait_seconds"] or 0.0
    result.release_seconds = sum(tier["seconds"] or 0.0 for tier in tiers)
    result.releases = sum(tier["times"] for tier in tiers)
    result.released_gib = sum(tier["released_bytes"] for tier in tiers) / 2**30


def run(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run both processes; return sums over both, and the longer one's seconds."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.SimpleQueue()
    children = [
        context.Process(target=train, args=(index, mode, arguments, barrier, results))
        for index in range(PROCESSES)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0, f"a process ended with {child.exitcode}"
    rows = [asdict(results.get()) for _ in children]
    return {
        name: (max if name == "seconds" else sum)(row[name] for row in rows) for name in rows[0]
    }


def main() -> None:
    """Parse the flags and print one line per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--phases",
        type=int,
        default=8,
        help="phases, in which the processes take turns (default 8)",
    )
    parser.add_argument("--mode", choices=MODES, help="only this mode")
    parser.add_argument("--length", type=int, default=25, help="steps of a phase (default 25)")
    arguments = parser.parse_args()
    print(
        f"{'mode':12}"
        + "".join(f"{field.name:>14}" for field in fields(Result))
        + f"{'steps/s':>14}"
    )
    for mode in [arguments.mode] if arguments.mode else MODES:
        with tempfile.TemporaryDirectory() as directory:
            os.environ["TORCHMEM_RUN_DIR"] = directory
            totals = run(mode, arguments)
        cells = "".join(
            f"{value:14.2f}" if isinstance(value, float) else f"{value:14}"
            for value in totals.values()
        )
        print(f"{mode:12}{cells}{totals['steps'] / totals['seconds']:14.1f}", flush=True)


if __name__ == "__main__":
    main()
