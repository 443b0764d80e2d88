"""Measure speed and memory of the simulated allocator: `python benchmarks/simulator.py`.

An event is one malloc or one free. Half of the sizes are for the small pool and half for the large
one, with a log-uniform distribution. Once the target number of live blocks is reached, a random
block is freed for each new one. Time is the CPU time of one core, in the best of several runs.
"""

from __future__ import annotations

import math
import random
import time
import tracemalloc

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.gpu import SimulatedGpu

EVENTS = 200_000
RUNS = 5
GPU_BYTES = 1 << 44
LIVE = (100, 1_000, 10_000, 50_000)
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4")


def draw_size(rng: random.Random) -> int:
    """Return 512 B to 1 MiB or 1 to 128 MiB, with equal probability."""
    low, high = (512, MIB) if rng.random() < 0.5 else (MIB + 1, 128 * MIB)
    return int(math.exp(rng.uniform(math.log(low), math.log(high))))


def program(live: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return pairs of a size and a slot; the previous block of the slot is freed first."""
    rng = random.Random(seed)  # noqa: S311 -- a workload, not a secret
    fill = [(draw_size(rng), slot) for slot in range(live)]
    return fill + [(draw_size(rng), rng.randrange(live)) for _ in range((EVENTS - live) // 2)]


def run(steps: list[tuple[int, int]], live: int, conf: str = "") -> tuple[float, int, int]:
    """Return the seconds and events of one run, and the number of blocks at its end."""
    allocator = DeviceCachingAllocator(SimulatedGpu(GPU_BYTES), config=AllocatorConfig.parse(conf))
    slots: list[Block | None] = [None] * live
    events = 0
    start = time.process_time()
    for size, slot in steps:
        old = slots[slot]
        if old is not None:
            allocator.free(old)
            events += 1
        slots[slot] = allocator.malloc(size)
        events += 1
    seconds = time.process_time() - start
    return seconds, events, sum(len(segment["blocks"]) for segment in allocator.memory_snapshot())


def bytes_per_block(live: int) -> float:
    """Return the bytes of Python memory per block after `live` allocations."""
    allocator = DeviceCachingAllocator(SimulatedGpu(GPU_BYTES))
    sizes = [size for size, _ in program(live)[:live]]
    tracemalloc.start()
    held = [allocator.malloc(size) for size in sizes]
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    blocks = sum(len(segment["blocks"]) for segment in allocator.memory_snapshot())
    return used / blocks if held else 0.0


def main() -> None:
    """Print one line for each setting and number of live blocks."""
    columns = f"{'live blocks':>12} {'all blocks':>12} {'events/s':>10} {'µs/event':>9}"
    print(f"{columns} {'B/block':>8}  settings")
    for conf in SETTINGS:
        for live in LIVE:
            steps = program(live)
            seconds, events, blocks = min(run(steps, live, conf) for _ in range(RUNS))
            rate, cost = events / seconds, seconds / events * 1e6
            memory = f"{bytes_per_block(live):>8.0f}" if not conf else " " * 8
            numbers = f"{live:>12,} {blocks:>12,} {rate:>10,.0f} {cost:>9.2f} {memory}"
            print(f"{numbers}  {conf or 'default'}")


if __name__ == "__main__":
    main()
