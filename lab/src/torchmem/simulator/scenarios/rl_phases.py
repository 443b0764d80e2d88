"""Scenario `rl-phases`: reinforcement learning alternates between generation and training.

Generation fills a cache of keys and values, one tensor per layer. Training computes the logits of
all tokens, a few tensors that are larger than any of those, so neither phase can use the blocks
that the other left in the cache. In the second half of the run, the script empties the cache
between generation and training.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 761_250_000
WEIGHTS = 80
"""Weights, gradients and optimizer state: 60.9 GB."""
LAYERS = 28
CACHE_BYTES = 1_085_000_000
"""Keys and values of one layer; 30.4 GB for all layers."""
LOGITS_BYTES = 5_100_000_000
LOGITS = 7
"""The logits, their softmax and gradients in single precision."""
GENERATION_EVENTS = 5
TRAINING_STEPS = 5
EMPTIED_FROM = 0.5
"""The share of the run after which the cache is emptied before training."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the loop of one rank; a step ends within the training phase."""
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    step = 0
    while True:
        cache = rank.malloc_many(LAYERS, CACHE_BYTES)
        for _ in range(GENERATION_EVENTS):
            yield "compute"
        rank.free_many(reversed(cache))
        if rank.progress(step) >= EMPTIED_FROM:
            rank.allocator.empty_cache()
        for _ in range(TRAINING_STEPS):
            yield from _train_step(rank)
            step += 1


def _train_step(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    logits = []
    for _ in range(LOGITS):
        logits.append(rank.allocator.malloc(LOGITS_BYTES))
        if len(logits) % 3 == 0:
            yield "compute"
    rank.free_many(reversed(logits))
    yield "step"


SCENARIO = Scenario(
    name="rl-phases",
    summary="Generation and training alternate and leave memory in the cache that the other cannot "
    "use; halfway, the script starts to empty it between them.",
    reproduces="52% of 127 GB reserved is slack after training; 37% once the cache is emptied "
    "between phases",
    source="nvidia-cosmos/cosmos-rl#388 (Qwen2.5-7B)",
    simulated="52.1% of 127.0 GB, then 37.0% of 96.6 GB",
    train=train,
    gpu_bytes=140 * GIB,
)
