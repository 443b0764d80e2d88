"""Scenario `leak`: each step keeps a little memory, until none is left.

The classic is `total_loss += loss`, which keeps the graph of every step. Activations have the same
size in each step and come from the cache, so only the leak asks the driver for memory, one segment
of 20 MiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

GPU_BYTES = 11 * GIB
WEIGHT_BYTES = 16 * MIB
WEIGHTS = 32
ACTIVATION_BYTES = 64 * MIB
ACTIVATIONS = 40
LEAKED_BYTES = 2 * MIB
"""Size of each tensor that a step keeps."""
FULL = 0.9
"""The share of the run after which the GPU is full."""


def leaked_tensors(rank: SimulatedRank) -> int:
    """Return how many tensors each step keeps, so that the GPU is full at the right time."""
    free = rank.capacity - WEIGHTS * WEIGHT_BYTES - ACTIVATIONS * ACTIVATION_BYTES
    return max(1, round(free / (FULL * rank.steps * LEAKED_BYTES)))


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    allocator = rank.allocator
    leaked = leaked_tensors(rank)
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    while True:
        live = []
        for index in range(ACTIVATIONS):
            live.append(allocator.malloc(ACTIVATION_BYTES))
            if index == ACTIVATIONS // 2:
                yield "compute"
        rank.malloc_many(leaked, LEAKED_BYTES)
        yield "compute"
        while live:
            allocator.free(live.pop())
            if len(live) == ACTIVATIONS // 2:
                yield "compute"
        yield "step"


SCENARIO = Scenario(
    name="leak",
    summary="Each step keeps a little memory, as total_loss += loss does: slow growth, then out of "
    "memory.",
    reproduces="an 11 GB GPU is full after some thousand iterations, and 20 MiB fail",
    source="sunsmarterjie/SDL-Skeleton#6 (3,200 iterations, compressed to the length of the run)",
    simulated="20 MiB fail on a full GPU, after 90% of the run",
    train=train,
    gpu_bytes=GPU_BYTES,
)
