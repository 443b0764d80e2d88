"""Scenario `healthy-slack`: much memory is cached, all of it is releasable, and nothing is wrong.

Batches of three kinds alternate. Their tensors differ in size, so each kind keeps its own segments
in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 1 * GIB
WEIGHTS = 24
KINDS = ((160, 64 * MIB), (44, 256 * MIB), (12, 1 * GIB))
"""Number and bytes of the tensors in a batch of each kind."""
SMALLEST_BATCH = 0.8


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    rng = rank.rng()
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    batch = 1.0
    while True:
        for count, size in KINDS:
            tensors = rank.malloc_many(round(count * batch), size)
            yield "compute"
            rank.free_many(reversed(tensors))
            yield "step"
        batch = rng.uniform(SMALLEST_BATCH, 1)


SCENARIO = Scenario(
    name="healthy-slack",
    summary="A third of the reserved memory is unused but releasable: no retry, no risk.",
    reproduces="31 to 43% slack without a single retry",
    source="meta-pytorch/torchrec#3770",
    simulated="37% slack, no retry",
    train=train,
)
