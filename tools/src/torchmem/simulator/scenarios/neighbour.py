"""Scenario `neighbour`: other processes come to the first rank's card, one after the other.

They are the classic of `torch.cuda.set_device` left out: each of the other ranks opens a CUDA context on the first
card as well. The training itself takes the same memory in each step; it returns its cache after each evaluation, and
once it does not get it back.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.card import SimulatedCard
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

NEIGHBOURS = 3
NEIGHBOUR_BYTES = 414 * MIB
ARRIVALS = (0.3, 0.5, 0.7)
"""The parts of the run after which the neighbours come."""
WEIGHT_BYTES = 64 * MIB
ACTIVATION_BYTES = 572 * MIB
LAYERS = 40
SPARE_BYTES = 1 * GIB
"""What the training leaves of its card."""
EVALUATIONS = 50
"""How often the cache is returned in the run."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, card = worker.allocator, worker.allocator.card
    weights = worker.capacity - LAYERS * ACTIVATION_BYTES - SPARE_BYTES
    for _ in range(weights // WEIGHT_BYTES):
        allocator.malloc(WEIGHT_BYTES)
    absent = card.use.others() if worker.rank == 0 else []
    evaluation, step = 0, 0
    while True:
        progress = worker.progress(step)
        evaluation, last_evaluation = int(progress * EVALUATIONS), evaluation
        if evaluation != last_evaluation:
            allocator.empty_cache()
            if absent and progress >= ARRIVALS[-len(absent)]:
                SimulatedCard(card.total_bytes, NEIGHBOUR_BYTES, use=absent.pop())
        live: list[Block] = []
        for _ in range(LAYERS):
            live.append(allocator.malloc(ACTIVATION_BYTES))
            if len(live) % (LAYERS // 2) == 0:
                yield "compute"
        while live:
            allocator.free(live.pop())
        yield "compute"
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="neighbour",
    summary="Other processes open their contexts on the first rank's card, until its own memory no longer fits.",
    reproduces="572 MiB are refused on a 40 GB card where three other processes hold 414 MiB each",
    source="awslabs/keys_values#92",
    train=train,
    card_bytes=40 * GIB,
    neighbours=NEIGHBOURS,
)
