"""Scenario `imbalanced-ranks`: the first rank evaluates a second copy of the model.

Only that rank holds the copy, averaged over the steps, and evaluates it on each batch. Images get
larger as training goes on, so this rank runs out of memory while the others still have half of
their GPU free.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 128 * MIB
WEIGHTS = 16
ACTIVATION_BYTES = 128 * MIB
"""The activation of one layer for the largest images."""
LAYERS = 120
SMALLEST = 0.2
"""Memory of the smallest images as a share of that of the largest."""
SIZES = 20
"""How often the images get larger."""
GROWTH_END = 0.95
"""The share of the run in which they grow; the first rank fails before its end."""
COPIES_OF_FIRST_RANK = 2


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    copies = COPIES_OF_FIRST_RANK if rank.rank == 0 else 1
    rank.malloc_weights(WEIGHTS * copies, WEIGHT_BYTES)
    size, step = 0, 0
    while True:
        size, last_size = int(SIZES * min(1, rank.progress(step) / GROWTH_END)), size
        if size != last_size:
            rank.allocator.empty_cache()
        activation = int(ACTIVATION_BYTES * (SMALLEST + (1 - SMALLEST) * size / SIZES))
        live: list[Block] = []
        for copy in range(COPIES_OF_FIRST_RANK):
            if copy < copies:
                live += rank.malloc_many(LAYERS, activation)
            yield "compute"
        rank.free_many(reversed(live))
        yield "compute"
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="imbalanced-ranks",
    summary="The first rank also evaluates a second copy of the model, and runs out of memory "
    "while the others use half a GPU.",
    reproduces="the first of eight GPUs holds about twice as much as the others",
    source="open-mmlab/mmdetection#206 (there, a checkpoint was loaded onto it)",
    simulated="2.0 times as much in each step",
    train=train,
    gpu_bytes=32 * GIB,
)
