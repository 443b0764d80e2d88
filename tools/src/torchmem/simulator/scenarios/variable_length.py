"""Scenario `variable-length`: fine-tuning on sequences that get longer in three stages.

Within a stage the batches differ, the longest first. What a stage leaves in the cache is too small for the longest
batch of the next, which gets new segments; nobody needs the old ones any more, and nothing gives them back.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

WEIGHT_BYTES = 142 * MIB
WEIGHTS = 40
"""A model of 8 billion parameters of four bits, and its adapters."""
ACTIVATION_BYTES = 41 * MIB
"""The activation of one layer for the longest sequence."""
LAYERS = 32
TENSORS = 4
"""Activations of each layer."""
STAGES = (0.35, 0.7, 1.0)
"""Longest sequence of each stage as a part of the longest of all."""
SHORTEST = 0.5
"""The shortest batch of a stage as a part of its longest."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, rng = worker.allocator, worker.rng()
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    stage, step = -1, 0
    while True:
        stage, last_stage = min(int(worker.progress(step) * len(STAGES)), len(STAGES) - 1), stage
        length = STAGES[stage] * (rng.uniform(SHORTEST, 1) if stage == last_stage else 1)
        live: list[Block] = []
        for layer in range(LAYERS):
            live += [allocator.malloc(int(ACTIVATION_BYTES * length)) for _ in range(TENSORS)]
            if layer % (LAYERS // 2) == 0:
                yield "compute"
        yield "compute"
        while live:
            allocator.free(live.pop())
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="variable-length",
    summary="Sequences get longer in three stages, and each stage leaves memory in the cache that the next cannot use.",
    reproduces="16.39 GiB are reserved where 10.83 would do, 34 % less",
    source="meta-pytorch/torchtune#1185 (Llama3-8B QLoRA; without the waste with expandable segments)",
    train=train,
    card_bytes=40 * GIB,
)
