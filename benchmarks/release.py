"""Measure what the setting `release` does for two processes that share a GPU.

turns: both train the same network. One has large batches while the other has small ones, and after
some steps they change places. The GPU cannot hold the large phases of both, nor the large phase of
one beside the cache that the other kept.

rlhf: a generator fills a KV cache, then a trainer (Adam, a reference model) trains, in turns. The
generator keeps a part of its KV cache for the next round. The GPU cannot hold the KV cache beside
the trainer's idle state, nor a training step beside the kept part.

A step that runs out of memory is counted and skipped.

    # On the phantom GPU nothing is computed, so that only the counts matter.
    python -m torchmem.phantom --memory 16GB -- python -m benchmarks.release
    python -m benchmarks.release --memory 16GB    # on a GPU

Runs: `release` off, each tier of it, `session.release()` at the end of each phase with the tier
`neighbors`, and `torch.cuda.empty_cache()` after every step. The hooks offload the optimizers, and
in rlhf the reference model, and evict the KV cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import torch
from examples.offload import ModuleOffload, OptimizerOffload

from torchmem import sdk
from torchmem.allocator.sizes import parse_size

WIDTH, LAYERS, PROCESSES = 4096, 8, 2
KV_SHARE, KEPT_SHARE, TRAIN_SHARE, PREFILL_SHARE = 0.8, 0.3, 0.45, 0.05
LARGE_SHARE, SMALL_SHARE = 0.55, 0.08
# Activations kept for each sample: input and output of the linear layer and of the ReLU, in fp32.
BYTES_PER_SAMPLE = 2 * LAYERS * WIDTH * 4
SETTINGS = {
    "hooks": "hooks=0.5",
    "cache": "cache=0.5",
    "emergency": "emergency",
    "neighbors": "neighbors",
    "release()": "neighbors",
}
MODES = ("off", *SETTINGS, "empty_cache")


@dataclass
class Result:
    """The result of one process.

    `utilization` is the mean share of the GPU that finished steps used at their peak.
    """

    steps: int = 0
    ooms: int = 0
    utilization: float = 0.0
    retries: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    releases: int = 0
    released_gib: float = 0.0
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


@dataclass
class Worker:
    """What both workloads need in one process."""

    index: int
    mode: str
    arguments: argparse.Namespace
    session: sdk.Session
    barrier: Barrier
    total: int
    result: Result = field(default_factory=Result)

    def meet(self) -> None:
        """Wait for the other process."""
        with self.session.idle():
            self.barrier.wait(300)

    def end_phase(self) -> None:
        """Return what the next phase of the other process can use, in the mode that does that."""
        if self.mode == "release()":
            self.session.release()

    def wait_for(self, wanted: float) -> None:
        """Wait before a phase, in the modes in which scripts do that."""
        if SETTINGS.get(self.mode) == "neighbors":
            self.session.wait_for_memory(int(wanted), timeout=3.0)

    def attempt(self, work: Callable[[], object]) -> None:
        """Run a step and count how it ended."""
        torch.cuda.reset_peak_memory_stats()
        try:
            work()
            self.result.steps += 1
            self.result.utilization += torch.cuda.max_memory_allocated() / self.total
        except torch.OutOfMemoryError:
            self.result.ooms += 1
        if self.mode == "empty_cache":
            torch.cuda.empty_cache()


def network() -> torch.nn.Sequential:
    """Return linear layers on the GPU."""
    return torch.nn.Sequential(
        *(m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()))
    ).cuda()


def take_turns(worker: Worker) -> None:
    """Train with large and small batches in turns; the barrier keeps both at the same step."""
    model, arguments = network(), worker.arguments
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    worker.session.on_pressure(OptimizerOffload(optimizer))
    previous = 0
    for batch in batches(worker.index, arguments.phases, arguments.length, worker.total):
        if 2 * batch < previous:
            worker.end_phase()
        if batch > 2 * previous:
            worker.wait_for(1.25 * batch * BYTES_PER_SAMPLE)
        previous = batch
        worker.meet()
        worker.attempt(partial(step, model, optimizer, batch))
        optimizer.zero_grad()


def pair(worker: Worker) -> None:
    """Generate in one process and train in the other, in turns."""
    work = (generator if worker.index else trainer)(worker)
    for number in range(worker.arguments.phases):
        worker.meet()
        if number % PROCESSES != worker.index:
            work()


def trainer(worker: Worker) -> Callable[[], None]:
    """Return a training phase of a policy, with Adam and a reference model."""
    model, reference = network(), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    worker.session.on_pressure(ModuleOffload(reference))
    worker.session.on_pressure(OptimizerOffload(optimizer), priority=1)
    size = int(TRAIN_SHARE * worker.total / BYTES_PER_SAMPLE)

    def one_step(batch: int) -> None:
        with torch.no_grad():
            reference(torch.randn(batch, WIDTH, device="cuda"))
        step(model, optimizer, batch)

    one_step(1)  # what stays, such as cuBLAS's workspaces, must not land in the memory of a phase
    optimizer.zero_grad()
    worker.end_phase()

    def phase() -> None:
        worker.wait_for(1.3 * TRAIN_SHARE * worker.total)
        for number in range(worker.arguments.length):
            worker.attempt(partial(one_step, int(size * (1 - 0.01 * (number % 7)))))
            optimizer.zero_grad()
        worker.end_phase()

    return phase


def generator(worker: Worker) -> Callable[[], None]:
    """Return a generation phase: a prefill, and a KV cache that grows by the same each step."""
    model, cache = network(), list[torch.Tensor]()
    is_busy = [False]
    length, total = worker.arguments.length, worker.total
    chunk = int(KV_SHARE * total / length)

    def evict(wanted: int) -> int:
        """Free what is kept between phases."""
        freed = 0
        while cache and freed < wanted and not is_busy[0]:
            freed += cache.pop().nbytes
        return freed

    worker.session.on_pressure(evict)

    def prefill(batch: int) -> None:
        with torch.no_grad():
            model(torch.randn(batch, WIDTH, device="cuda"))

    prefill(1)  # as in the trainer

    def decode() -> None:
        prefill(64)
        cache.append(torch.empty(chunk, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()

    def phase() -> None:
        is_busy[0] = True
        cache.clear()
        worker.wait_for((KV_SHARE + PREFILL_SHARE / 2) * total)
        prefill(int(PREFILL_SHARE * total / WIDTH / 16))
        for _ in range(length):
            worker.attempt(decode)
            worker.session.step()
        del cache[int(KEPT_SHARE * length) :]
        is_busy[0] = False
        worker.end_phase()

    return phase


WORKLOADS = {"turns": take_turns, "rlhf": pair}


def work(
    index: int, workload: str, mode: str, arguments: argparse.Namespace, both: tuple[Barrier, Any]
) -> None:
    """Run a workload in one process, and send the result."""
    barrier, results = both
    session = sdk.instrument(
        rank=index, interval=1e-6, release=SETTINGS.get(mode), release_interval=1e-6
    )
    torch.cuda.init()
    total = arguments.memory or torch.cuda.mem_get_info()[1]
    worker = Worker(index, mode, arguments, session, barrier, total)
    started = time.perf_counter()
    WORKLOADS[workload](worker)
    result = worker.result
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


def run(workload: str, mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run both processes; return sums over both, and the longer one's seconds."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.SimpleQueue()
    children = [
        context.Process(target=work, args=(index, workload, mode, arguments, (barrier, results)))
        for index in range(PROCESSES)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0, f"a process ended with {child.exitcode}"
    rows = [asdict(results.get()) for _ in children]
    totals = {
        name: (max if name == "seconds" else sum)(row[name] for row in rows) for name in rows[0]
    }
    slots = arguments.phases * arguments.length * (PROCESSES if workload == "turns" else 1)
    totals["utilization"] *= (PROCESSES if workload == "turns" else 1) / slots
    return totals


def main() -> None:
    """Parse the flags, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--phases",
        type=int,
        default=8,
        help="phases, in which the processes take turns (default 8)",
    )
    parser.add_argument("--workload", choices=WORKLOADS, help="only this workload")
    parser.add_argument("--mode", choices=MODES, help="only this mode")
    parser.add_argument("--length", type=int, default=25, help="steps of a phase (default 25)")
    parser.add_argument(
        "--memory",
        type=parse_size,
        help="memory to share; another process holds the rest of the GPU (default: all)",
    )
    arguments = parser.parse_args()
    with rest_of_the_gpu(arguments.memory):
        compare(arguments)


def hold(memory: int, is_ready: Event, is_over: Event) -> None:
    """Hold all memory of the GPU but this much, until the event."""
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(free - memory, dtype=torch.uint8, device="cuda")
    is_ready.set()
    is_over.wait()
    del held


@contextmanager
def rest_of_the_gpu(memory: int | None) -> Iterator[None]:
    """Hold all memory of the GPU but this much, in a process of its own; nothing for None."""
    if memory is None:
        yield
        return
    context = multiprocessing.get_context("spawn")
    is_ready, is_over = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(memory, is_ready, is_over))
    holder.start()
    assert is_ready.wait(120), "no process could hold the rest of the GPU"
    try:
        yield
    finally:
        is_over.set()
        holder.join()


def compare(arguments: argparse.Namespace) -> None:
    """Print one line per run."""
    names = "".join(f"{field.name:>16}" for field in fields(Result))
    for workload in [arguments.workload] if arguments.workload else WORKLOADS:
        print(f"{workload:16}{names}{'steps/s':>16}")
        for mode in [arguments.mode] if arguments.mode else MODES:
            with tempfile.TemporaryDirectory() as directory:
                os.environ["TORCHMEM_RUN_DIR"] = directory
                totals = run(workload, mode, arguments)
            cells = "".join(
                f"{value:16.2f}" if isinstance(value, float) else f"{value:16}"
                for value in totals.values()
            )
            print(f"{mode:16}{cells}{totals['steps'] / totals['seconds']:16.1f}", flush=True)


if __name__ == "__main__":
    main()
