"""Scenario `qkv`: queries, keys and values of one sequence after the other, and sequences that become shorter.

A batch always holds the same number of tokens: fewer long sequences or more short ones, so that what is allocated
stays the same. But a short tensor takes the cached place of a long one and wastes the rest, and the sequences that
come on top need places of their own. The last rank sorts its data, longest first, as many do to fail early: reserved
memory creeps up until a tensor no longer fits. The other ranks shuffle, and the allocator recovers by retries.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

WEIGHT_BYTES = 256 * MIB
WEIGHTS = 16
LAYERS = 8
LONGEST = 12_288
"""Tokens of the longest sequence."""
SHORTEST = 0.5
"""The shortest sequence as a part of the longest."""
TOKEN_BYTES = 8192
"""A query, key or value of one token in one layer: 4096 features of two bytes."""
BATCH_TOKENS = 21 * LONGEST
JITTER = 0.01
SHUFFLED_SHORTEST = 0.7
"""The other ranks' shortest sequence: shuffled lengths from half on are too much for them as well, sooner or later."""
SORTED_OVER = 0.92
"""The part of the run over which the sorted sequences go from the longest to the shortest."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, rng = worker.allocator, worker.rng()
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    step = 0
    while True:
        part = 1 - (1 - SHORTEST) * min(1, worker.progress(step) / SORTED_OVER)
        if not worker.is_last:
            part = rng.uniform(SHUFFLED_SHORTEST, 1)
        tokens = int(LONGEST * part * rng.uniform(1 - JITTER, 1))
        live: list[Block] = []
        for layer in range(LAYERS):
            for _ in range(BATCH_TOKENS // tokens):
                live += [allocator.malloc(tokens * TOKEN_BYTES) for _ in "qkv"]
            if layer % (LAYERS // 2) == 0:
                yield "compute"
        yield "compute"
        while live:
            allocator.free(live.pop())
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="qkv",
    summary="Queries, keys and values of ever shorter sequences waste the cached places of longer ones, until one "
    "rank runs out.",
    reproduces="out of memory with 60 % allocated: 43 % of the memory was wasted at most",
    source="STAlloc, arXiv 2507.16274 (pipelines with recomputation; here attention alone)",
    train=train,
)
