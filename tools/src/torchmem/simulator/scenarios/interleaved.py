"""Scenario `interleaved`: 100 MB and 4 MB tensors in turn; then 52 MB tensors, each of which takes a hole for two.

The statistics of a layer are created behind its first activation, so that a cached activation always has a live
neighbour. Layers are added as training goes on, until the card is full of such pairs. Then the sequences become half
as long, and more: two halves need a little more than one hole of 100 MB, so each hole holds one tensor and wastes
the rest. Only the last rank's batch grows until a tensor too many is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

CHECKPOINT_BYTES = 28 * GIB
"""The checkpoint is loaded onto the card and dropped: one large free block, which the pairs then share."""
WEIGHT_BYTES = 256 * MIB
WEIGHTS = 11
ACTIVATION_BYTES = 100 * MIB
STATISTICS_BYTES = 4 * MIB
LAYERS = 275
SHORT_BYTES = 52 * MIB
"""An activation in the second half of the run: two of them do not fit into the place of one from the first half."""

DEEP = 0.4
"""The part of the run over which layers are added."""
SHORTENED = 0.5
"""The part of the run after which the sequences are short."""
FULL = 0.9
"""The part of the run after which the last rank's batch needs a tensor more than there are holes."""
FIRST_BATCH, LARGEST_BATCH = 0.3, 0.8
"""The short batch at the beginning, and the largest of the other ranks, as a part of the holes."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator = worker.allocator
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    allocator.free(allocator.malloc(CHECKPOINT_BYTES))
    statistics: list[Block] = []
    step = 0
    while True:
        size, count = _activations(worker, step)
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


def _activations(worker: Worker, step: int) -> tuple[int, int]:
    """Size in bytes and number of the activations of a step."""
    progress = worker.progress(step)
    if progress < SHORTENED:
        return ACTIVATION_BYTES, min(LAYERS, 1 + int(LAYERS * progress / DEEP))
    growth = (progress - SHORTENED) / (FULL - SHORTENED)
    batch = FIRST_BATCH + (1 - FIRST_BATCH) * growth
    return SHORT_BYTES, int(LAYERS * (batch if worker.is_last else min(batch, LARGEST_BATCH))) + 1


SCENARIO = Scenario(
    name="interleaved",
    summary="100 MB and 4 MB tensors in turn: each small one keeps a hole of 100 MB, of which later tensors use half.",
    reproduces="about 50 MB are refused on a 32 GB card while 13 GB lie free in split blocks",
    source="pytorch/pytorch#44742",
    train=train,
    card_bytes=32 * GIB,
)
