"""Scenario `leak`: something keeps a little memory of each step, until nothing is left.

The classic is `total_loss += loss`: the sum keeps the graph of every step. Activations are the same each time and
come from the cache, so that only what leaks asks the driver for memory, a segment of 20 MiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

CARD_BYTES = 11 * GIB
WEIGHT_BYTES = 16 * MIB
WEIGHTS = 32
ACTIVATION_BYTES = 64 * MIB
ACTIVATIONS = 40
LEAKED_BYTES = 2 * MIB
"""The tensors that each step keeps."""
FULL = 0.9
"""The part of the run after which the card is full."""


def leaked_tensors(worker: Worker) -> int:
    """How many tensors each step keeps, so that the card is full at the right time."""
    free = worker.capacity - WEIGHTS * WEIGHT_BYTES - ACTIVATIONS * ACTIVATION_BYTES
    return max(1, round(free / (FULL * worker.steps * LEAKED_BYTES)))


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator = worker.allocator
    leaked = leaked_tensors(worker)
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    while True:
        live = []
        for index in range(ACTIVATIONS):
            live.append(allocator.malloc(ACTIVATION_BYTES))
            if index == ACTIVATIONS // 2:
                yield "compute"
        for _ in range(leaked):
            allocator.malloc(LEAKED_BYTES)
        yield "compute"
        while live:
            allocator.free(live.pop())
            if len(live) == ACTIVATIONS // 2:
                yield "compute"
        yield "step"


SCENARIO = Scenario(
    name="leak",
    summary="Each step keeps a little memory, as total_loss += loss does: slow growth, then out of memory.",
    reproduces="an 11 GB card is full after some thousand iterations and refuses 20 MiB",
    source="sunsmarterjie/SDL-Skeleton#6 (3,200 iterations, compressed here to the length of the run)",
    train=train,
    card_bytes=CARD_BYTES,
)
