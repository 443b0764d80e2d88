"""Scenario `qkv`: queries, keys and values of ever shorter sequences.

A batch always holds the same number of tokens, as fewer long or more short sequences, so the
allocated memory stays the same. But a short tensor takes the cached block of a long one and wastes
the rest, and the additional sequences need blocks of their own. The last rank sorts its data,
longest first, as many do to fail early: its reserved memory creeps up until a tensor no longer
fits. The other ranks shuffle, and their allocator recovers by retries.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 256 * MIB
WEIGHTS = 16
LAYERS = 8
LONGEST = 12_288
"""Tokens of the longest sequence."""
SHORTEST = 0.5
"""The shortest sequence as a share of the longest."""
TOKEN_BYTES = 8192
"""A query, key or value of one token in one layer: 4096 features of two bytes."""
BATCH_TOKENS = 21 * LONGEST
JITTER = 0.01
SHUFFLED_SHORTEST = 0.7
"""The other ranks' shortest sequence: shuffled lengths from 0.5 on would exhaust them, too."""
SORTED_OVER = 0.92
"""The share of the run in which the sorted sequences go from the longest to the shortest."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    rng = rank.rng()
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    step = 0
    while True:
        length = 1 - (1 - SHORTEST) * min(1, rank.progress(step) / SORTED_OVER)
        if not rank.is_last:
            length = rng.uniform(SHUFFLED_SHORTEST, 1)
        tokens = int(LONGEST * length * rng.uniform(1 - JITTER, 1))
        live: list[Block] = []
        for layer in range(LAYERS):
            live += rank.malloc_many(3 * (BATCH_TOKENS // tokens), tokens * TOKEN_BYTES)
            if layer % (LAYERS // 2) == 0:
                yield "compute"
        yield "compute"
        rank.free_many(reversed(live))
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="qkv",
    summary="Queries, keys and values of ever shorter sequences waste the cached blocks of longer "
    "ones, until one rank runs out of memory.",
    reproduces="out of memory with 60% allocated; at most 43% of the memory was wasted",
    source="STAlloc, arXiv 2507.16274 (pipelines with recomputation; here attention alone)",
    simulated="63% of the GPU allocated, 36% free in pieces",
    effects="the last rank's reserved memory climbs while its allocated peak stays, then it fails "
    "of fragmentation; the others retry now and then",
    train=train,
)
