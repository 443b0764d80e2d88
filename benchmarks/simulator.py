"""Events per second of the simulated allocator on a mixed workload: `python benchmarks/simulator.py`.

An event is one malloc or one free. Sizes are half small-pool and half large-pool, log-uniform; once the target number
of live blocks is reached, a random one is freed for each new one. The best of several runs counts.
"""

from __future__ import annotations

import math
import random
import time

from torchmem.core.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.card import SimulatedCard

EVENTS = 200_000
RUNS = 3
CARD_BYTES = 1 << 50


def draw_size(rng: random.Random) -> int:
    """512 B to 1 MiB, or 1 to 128 MiB, with equal chance."""
    low, high = (512, MIB) if rng.random() < 0.5 else (MIB + 1, 128 * MIB)
    return int(math.exp(rng.uniform(math.log(low), math.log(high))))


def program(live: int, seed: int = 0) -> list[tuple[int, int]]:
    """(size to allocate, slot to put it in) pairs; what the slot held is freed first."""
    rng = random.Random(seed)  # noqa: S311 -- a workload, not a secret
    fill = [(draw_size(rng), slot) for slot in range(live)]
    return fill + [(draw_size(rng), rng.randrange(live)) for _ in range((EVENTS - live) // 2)]


def run(steps: list[tuple[int, int]], live: int) -> tuple[float, int, int]:
    """Seconds and events of one run, and the blocks that exist at its end."""
    allocator = DeviceCachingAllocator(SimulatedCard(CARD_BYTES))
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


def main() -> None:
    """Print one line for each number of live blocks."""
    print(f"{'live blocks':>12} {'all blocks':>12} {'events':>9} {'events/s':>10} {'µs/event':>9}")
    for live in (100, 1_000, 10_000, 50_000):
        steps = program(live)
        seconds, events, blocks = min(run(steps, live) for _ in range(RUNS))
        print(f"{live:>12,} {blocks:>12,} {events:>9,} {events / seconds:>10,.0f} {seconds / events * 1e6:>9.2f}")


if __name__ == "__main__":
    main()
