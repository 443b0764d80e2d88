"""Scenario `imbalanced-ranks`: the first rank does what the others do, and the same once more for the evaluation.

It alone holds a second copy of the model, averaged over the steps, and evaluates it on each batch. The images get
larger as training goes on, so that this rank is out of memory when the others have half of their card left.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

WEIGHT_BYTES = 128 * MIB
WEIGHTS = 16
ACTIVATION_BYTES = 128 * MIB
"""The activation of one layer for the largest images."""
LAYERS = 120
SMALLEST = 0.2
"""Memory of the smallest images as a part of that of the largest."""
SIZES = 20
"""How often the images get larger."""
GROWN = 0.95
"""The part of the run over which they grow; the first rank does not see the end of it."""
COPIES_OF_FIRST_RANK = 2


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator = worker.allocator
    copies = COPIES_OF_FIRST_RANK if worker.rank == 0 else 1
    for _ in range(WEIGHTS * copies):
        allocator.malloc(WEIGHT_BYTES)
    size, step = 0, 0
    while True:
        size, last_size = int(SIZES * min(1, worker.progress(step) / GROWN)), size
        if size != last_size:
            allocator.empty_cache()
        activation = int(ACTIVATION_BYTES * (SMALLEST + (1 - SMALLEST) * size / SIZES))
        live: list[Block] = []
        for copy in range(COPIES_OF_FIRST_RANK):
            if copy < copies:
                live += [allocator.malloc(activation) for _ in range(LAYERS)]
            yield "compute"
        while live:
            allocator.free(live.pop())
        yield "compute"
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="imbalanced-ranks",
    summary="The first rank also evaluates a second copy of the model, and runs out when the others use half a card.",
    reproduces="the first of eight GPUs holds about twice as much as the others",
    source="open-mmlab/mmdetection#206 (there a checkpoint was loaded onto it)",
    train=train,
    card_bytes=32 * GIB,
)
