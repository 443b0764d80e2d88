"""Scenario `healthy-slack`: much memory is cached but not in use, all of it can be given back, and nothing is wrong.

Batches of three kinds take turns. Their tensors differ in size, so each kind keeps segments of its own in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

WEIGHT_BYTES = 1 * GIB
WEIGHTS = 24
KINDS = ((160, 64 * MIB), (44, 256 * MIB), (12, 1 * GIB))
"""Number and bytes of the tensors in a batch of each kind, from the smallest to the largest tensor."""
SMALLEST_BATCH = 0.8


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, rng = worker.allocator, worker.rng()
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    batch = 1.0
    while True:
        for count, size in KINDS:
            tensors = [allocator.malloc(size) for _ in range(round(count * batch))]
            yield "compute"
            while tensors:
                allocator.free(tensors.pop())
            yield "step"
        batch = rng.uniform(SMALLEST_BATCH, 1)


SCENARIO = Scenario(
    name="healthy-slack",
    summary="A third of the reserved memory is cached and unused, but can be given back: no retry, no danger.",
    reproduces="31 to 43 % slack without a single retry",
    source="meta-pytorch/torchrec#3770",
    train=train,
)
