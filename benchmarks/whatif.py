"""Measure `torchmem whatif` on a long trace: seconds, CPU seconds and memory.

    python -m benchmarks.whatif                          # 1,000,000 events under 8 settings
    python -m benchmarks.whatif --against HEAD~20        # and the code of another commit

The trace is that of a job whose batches vary in length, on the simulated allocator, in the form of
`torch.cuda.memory._dump_snapshot` without stacks. Each measurement is the command in a process of
its own. CPU time is that of all its processes. Memory is the highest sum of the resident memory of
all processes, looked at every 20 ms; each has its share of the pages that several of them use.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.gpu import SimulatedGpu

EVENTS = 1_000_000
GPU_BYTES = 80 * GIB
LAYERS = 48
WIDTHS = (64 << 10, 48 << 10, 96 << 10, 8 << 10, 100)
"""Bytes of a layer's activations for each token of a batch."""
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95",
    "expandable_segments:True,roundup_power2_divisions:4",
)
ROOTS = ("core/src", "sdk/src", "exporter/src", "lab/src", "tools/src")


class Recorder(SimulatedGpu):
    """A GPU whose trace has the entries of its allocator."""

    def __init__(self) -> None:
        super().__init__(GPU_BYTES)
        self.trace: list[dict[str, Any]] = []
        self._segments: dict[int, int] = {}
        self.allocator = DeviceCachingAllocator(self)

    def cuda_malloc(self, size: int) -> int | None:
        """Allocate a segment and record it."""
        address = super().cuda_malloc(size)
        if address is not None:
            self._segments[address] = size
            self._record("segment_alloc", address, size)
        return address

    def cuda_free(self, address: int) -> None:
        """Free a segment and record it."""
        super().cuda_free(address)
        self._record("segment_free", address, self._segments.pop(address))

    def alloc(self, size: int) -> Block:
        """Allocate a block and record it."""
        block = self.allocator.malloc(size)
        self._record("alloc", block.address, size)
        return block

    def free(self, block: Block) -> None:
        """Free a block and record it."""
        for action in ("free_requested", "free_completed"):
            self._record(action, block.address, block.requested_size)
        self.allocator.free(block)

    def _record(self, action: str, address: int, size: int) -> None:
        entry = {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "time_us": 10**15 + 7 * len(self.trace),
            "pool_id": (0, 0),
            "frames": [],
        }
        self.trace.append(entry)


def write_trace(path: Path, events: int) -> None:
    """Write the snapshot of a job of about `events` events."""
    gc.disable()
    job, rng = Recorder(), random.Random(0)  # noqa: S311 - a workload, not a secret
    for size in [32 * MIB, 4 * MIB, 16_384, 16_384] * LAYERS:
        job.alloc(size)
    while len(job.trace) < events:
        length = rng.randrange(256, 2048)
        sizes = [length * width for _ in range(LAYERS) for width in WIDTHS]
        for block in reversed([job.alloc(size) for size in sizes]):
            job.free(block)
    segments = [{**segment, "frames": []} for segment in job.allocator.memory_snapshot()]
    snapshot = {"segments": segments, "device_traces": [job.trace], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    gc.enable()


def measure(trace: Path, environment: dict[str, str]) -> dict[str, float]:
    """Run the command once."""
    settings = [part for conf in SETTINGS for part in ("--setting", conf)]
    command = [sys.executable, "-m", "torchmem.cli", "whatif", "--gpu-model", "80GiB", "--json"]
    before, began = _children_cpu(), time.perf_counter()
    process = subprocess.Popen(
        [*command, *settings, str(trace)], env=environment, stdout=subprocess.DEVNULL
    )
    highest = 0
    while process.poll() is None:
        highest = max(highest, sum(map(_resident, _tree(process.pid))))
        time.sleep(0.02)
    if process.returncode not in {0, 1}:
        raise SystemExit(f"the command failed with exit code {process.returncode}.")
    return {
        "seconds": time.perf_counter() - began,
        "CPU seconds": _children_cpu() - before,
        "MB": highest / 1e6,
    }


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def checkout(commit: str) -> Iterator[dict[str, str]]:
    """Yield an environment in which Python imports the code of a commit."""
    with tempfile.TemporaryDirectory(prefix="torchmem-benchmark-") as folder:
        archive = subprocess.run(["git", "archive", commit], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        roots = os.pathsep.join(str(Path(folder, root)) for root in ROOTS)
        yield os.environ | {"PYTHONPATH": roots}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=EVENTS, help="(default: %(default)s)")
    parser.add_argument("--against", metavar="COMMIT", help="also measure the code of this commit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchmem-benchmark-") as folder:
        trace = Path(folder, "trace.pickle")
        write_trace(trace, arguments.events)
        print(f"{arguments.events:,} events, {len(SETTINGS)} settings, {trace.stat().st_size:,} B")
        if arguments.against:
            with checkout(arguments.against) as environment:
                show(arguments.against, measure(trace, environment))
        show("this code", measure(trace, dict(os.environ)))


def show(name: str, figures: dict[str, float]) -> None:
    """Print one row."""
    print(f"{name:<20}" + "".join(f"{value:10.1f} {unit}" for unit, value in figures.items()))


if __name__ == "__main__":
    main()
