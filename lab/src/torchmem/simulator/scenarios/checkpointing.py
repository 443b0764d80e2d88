"""Scenario `checkpointing`: recomputed layers allocate in bursts while sequences slowly get longer.

The forward pass keeps one tensor per layer and drops the rest. The backward pass recomputes a
layer, which is four times as wide inside, and drops it again. Sequences get a little longer every
sixth of the run. A tensor to keep then no longer fits where one was before, so the whole set moves
to new segments and to the wide blocks that the bursts left.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 512 * MIB
WEIGHTS = 66
LAYERS = 40
HIDDEN_BYTES = 300 * MIB
"""What a layer passes to the next, for the longest sequence."""
WIDENING = 4
"""How much wider a layer is inside."""
STAGES = (0.9, 0.92, 0.94, 0.96, 0.98, 1.0)
"""The longest sequence of each sixth of the run as a share of the longest of all."""
SHORTEST = 0.8
"""The shortest batch of a sixth as a share of its longest."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    rng = rank.rng()
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    stage, step = -1, 0
    while True:
        stage, last_stage = min(int(rank.progress(step) * len(STAGES)), len(STAGES) - 1), stage
        length = STAGES[stage] * (rng.uniform(SHORTEST, 1) if stage == last_stage else 1)
        hidden = int(HIDDEN_BYTES * length)
        kept = [_forward(rank, hidden) for _ in range(LAYERS)]
        yield "compute"
        while kept:
            _backward(rank, hidden)
            rank.allocator.free(kept.pop())
            if len(kept) % (LAYERS // 2) == 0:
                yield "compute"
        yield "step"
        step += 1


def _forward(rank: SimulatedRank, hidden: int) -> Block:
    """Run one layer without a graph: drop everything after its use, except for the output."""
    queries_keys_values = rank.malloc_many(3, hidden)
    attention = rank.allocator.malloc(hidden)
    rank.free_many(queries_keys_values)
    gate_and_up = rank.malloc_many(2, WIDENING * hidden)
    product = rank.allocator.malloc(WIDENING * hidden)
    rank.free_many(gate_and_up)
    output = rank.allocator.malloc(hidden)
    rank.free_many([product, attention])
    return output


def _backward(rank: SimulatedRank, hidden: int) -> None:
    """Recompute one layer and keep all of it until its gradients are computed."""
    queries_keys_values_attention = rank.malloc_many(4, hidden)
    gate_up_product_gradient = rank.malloc_many(4, WIDENING * hidden)
    rank.free_many(gate_up_product_gradient + queries_keys_values_attention)


SCENARIO = Scenario(
    name="checkpointing",
    summary="Layers are recomputed in bursts; sequences get a little longer now and then, and "
    "blocks cached for shorter ones cannot be used.",
    reproduces="up to 30% of the reserved peak is lost where layers are recomputed",
    source="GMLake, arXiv 2401.08156 and its README",
    simulated="30% slack at the peak",
    effects="reserved memory climbs in six steps while the allocated peak hardly moves; no retry",
    train=train,
)
