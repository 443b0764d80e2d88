"""Scenario `checkpointing`: recomputed layers allocate in bursts, and what is kept for them strands as lengths grow.

The forward pass keeps one tensor of each layer and drops the rest; the backward pass recomputes a layer, four times
as wide inside, and drops it again. Sequences get a little longer every sixth of the run. A tensor to keep then no
longer fits where one lay before, so that the whole set moves to new segments, and to the wide ones that the bursts
had left.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

WEIGHT_BYTES = 512 * MIB
WEIGHTS = 66
LAYERS = 40
HIDDEN_BYTES = 300 * MIB
"""What a layer passes to the next, for the longest sequence."""
WIDENING = 4
"""How much wider a layer is inside."""
STAGES = (0.9, 0.92, 0.94, 0.96, 0.98, 1.0)
"""Longest sequence of each sixth of the run as a part of the longest of all."""
SHORTEST = 0.8
"""The shortest batch of a sixth as a part of its longest."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, rng = worker.allocator, worker.rng()
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    stage, step = -1, 0
    while True:
        stage, last_stage = min(int(worker.progress(step) * len(STAGES)), len(STAGES) - 1), stage
        length = STAGES[stage] * (rng.uniform(SHORTEST, 1) if stage == last_stage else 1)
        hidden = int(HIDDEN_BYTES * length)
        kept = [_forward(allocator, hidden) for _ in range(LAYERS)]
        yield "compute"
        while kept:
            _backward(allocator, hidden)
            allocator.free(kept.pop())
            if len(kept) % (LAYERS // 2) == 0:
                yield "compute"
        yield "step"
        step += 1


def _forward(allocator: DeviceCachingAllocator, hidden: int) -> Block:
    """One layer without a graph: everything is dropped as soon as it was used, but for the output."""
    narrow = [allocator.malloc(hidden) for _ in "qkv"]
    attention = allocator.malloc(hidden)
    _free(allocator, narrow)
    wide = [allocator.malloc(WIDENING * hidden) for _ in ("gate", "up")]
    product = allocator.malloc(WIDENING * hidden)
    _free(allocator, wide)
    output = allocator.malloc(hidden)
    _free(allocator, [product, attention])
    return output


def _backward(allocator: DeviceCachingAllocator, hidden: int) -> None:
    """One layer again, all of it kept until its gradients are there."""
    narrow = [allocator.malloc(hidden) for _ in ("q", "k", "v", "attention")]
    wide = [allocator.malloc(WIDENING * hidden) for _ in ("gate", "up", "product", "gradient")]
    _free(allocator, wide + narrow)


def _free(allocator: DeviceCachingAllocator, blocks: list[Block]) -> None:
    for block in blocks:
        allocator.free(block)


SCENARIO = Scenario(
    name="checkpointing",
    summary="Layers are recomputed in bursts; sequences get a little longer now and then, and what was kept for "
    "shorter ones is of no use.",
    reproduces="up to 30 % of the reserved peak are lost where layers are recomputed",
    source="GMLake, arXiv 2401.08156 and its README",
    train=train,
)
