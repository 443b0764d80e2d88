"""Scenario `interleaved`: alternating 100 MB and 4 MB tensors, then 52 MB tensors in their holes.

The statistics of a layer are created behind its first activation, so a cached activation always has
a live neighbor. The first steps fill the GPU with such pairs. Then the sequences shrink to
slightly more than half: two activations no longer fit into one hole of 100 MB, so each hole holds
one tensor and wastes the rest. Only the last rank's batch grows until it needs more tensors than
there are holes.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

CHECKPOINT_BYTES = 28 * GIB
"""The checkpoint is loaded onto the GPU and dropped: one large free block for the pairs."""
WEIGHT_BYTES = 256 * MIB
WEIGHTS = 11
ACTIVATION_BYTES = 100 * MIB
STATISTICS_BYTES = 4 * MIB
LAYERS = 275
SHORT_BYTES = 52 * MIB
"""An activation in the second half of the run: two do not fit into one of the first half."""

DEEP = 0.01
"""The share of the run in which layers are added."""
SHORTENED = 0.5
"""The share of the run after which the sequences are short."""
FULL = 0.9
"""The share of the run after which the last rank needs more tensors than there are holes."""
FIRST_BATCH, LARGEST_BATCH = 0.3, 0.8
"""The first short batch, and the largest of the other ranks, as shares of the number of holes."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    allocator = rank.allocator
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    allocator.free(allocator.malloc(CHECKPOINT_BYTES))
    statistics: list[Block] = []
    step = 0
    while True:
        size, count = _activations(rank, step)
        live: list[Block] = []
        for layer in range(count):
            live.append(allocator.malloc(size))
            if layer == len(statistics):
                statistics.append(allocator.malloc(STATISTICS_BYTES))
            if layer == count // 2:
                yield "compute"
        yield "compute"
        while live:
            allocator.free(live.pop())
            if len(live) == count // 2:
                yield "compute"
        yield "step"
        step += 1


def _activations(rank: SimulatedRank, step: int) -> tuple[int, int]:
    """Return the size in bytes and the number of activations of a step."""
    progress = rank.progress(step)
    if progress < SHORTENED:
        return ACTIVATION_BYTES, min(LAYERS, 1 + int(LAYERS * progress / DEEP))
    growth = (progress - SHORTENED) / (FULL - SHORTENED)
    batch = FIRST_BATCH + (1 - FIRST_BATCH) * growth
    return SHORT_BYTES, int(LAYERS * (batch if rank.is_last else min(batch, LARGEST_BATCH))) + 1


SCENARIO = Scenario(
    name="interleaved",
    summary="100 MB and 4 MB tensors alternate: each small one pins a hole of 100 MB, half of "
    "which later tensors can use.",
    reproduces="about 50 MB fail on a 32 GB GPU while 13 GB are free in split blocks",
    source="pytorch/pytorch#44742",
    simulated="52 MiB fail with 12.9 GiB free on 32 GiB, no piece above 48 MiB",
    effects="reserved memory stays full; fragmentation jumps to 0.99 when the sequences get short; "
    "the last rank fails of fragmentation",
    train=train,
    gpu_bytes=32 * GIB,
)
