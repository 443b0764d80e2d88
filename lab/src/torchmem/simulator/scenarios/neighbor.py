"""Scenario `neighbor`: other processes start to use the first rank's GPU, one after another.

This happens if `torch.cuda.set_device` is missing: each of the other ranks opens a CUDA context on
the first GPU as well. The training takes the same memory in each step. It releases its cache after
each evaluation, and at some point cannot get it back.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

NEIGHBORS = 3
NEIGHBOR_BYTES = 414 * MIB
ARRIVALS = (0.3, 0.5, 0.7)
"""The shares of the run after which the neighbors arrive."""
WEIGHT_BYTES = 64 * MIB
ACTIVATION_BYTES = 572 * MIB
LAYERS = 40
SPARE_BYTES = 1 * GIB
"""What the training leaves free on its GPU."""
EVALUATIONS = 50
"""How often the cache is released in the run."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    allocator, gpu = rank.allocator, rank.allocator.gpu
    weights = rank.capacity - LAYERS * ACTIVATION_BYTES - SPARE_BYTES
    rank.malloc_weights(weights // WEIGHT_BYTES, WEIGHT_BYTES)
    absent = gpu.use.others() if rank.rank == 0 else []
    evaluation, step = 0, 0
    while True:
        progress = rank.progress(step)
        evaluation, last_evaluation = int(progress * EVALUATIONS), evaluation
        if evaluation != last_evaluation:
            allocator.empty_cache()
            if absent and progress >= ARRIVALS[-len(absent)]:
                SimulatedGpu(gpu.total_bytes, NEIGHBOR_BYTES, use=absent.pop())
        live: list[Block] = []
        for _ in range(LAYERS):
            live.append(allocator.malloc(ACTIVATION_BYTES))
            if len(live) % (LAYERS // 2) == 0:
                yield "compute"
        rank.free_many(reversed(live))
        yield "compute"
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="neighbor",
    summary="Other processes open contexts on the first rank's GPU, until its own memory no "
    "longer fits.",
    reproduces="572 MiB fail on a 40 GB GPU where three other processes hold 414 MiB each",
    source="awslabs/keys_values#92",
    simulated="572 MiB fail with 386 free, while others hold three times 414 MiB",
    train=train,
    gpu_bytes=40 * GIB,
    neighbors=NEIGHBORS,
)
