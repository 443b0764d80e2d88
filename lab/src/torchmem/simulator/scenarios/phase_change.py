"""Scenario `phase-change`: training and validation in turns, with batches of different sizes.

Validation has batches that are several times as large, and collects the outputs of some layers.
Each needs a larger block than any that is cached, so that memory is almost full at its end. Then
the script empties the cache, and training again needs half of the GPU. In the last epochs, the
last rank keeps features of each layer. They lie in blocks that training left in the cache, and pin
their segments, so that there is less and less for the next validation, while training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

GPU_BYTES = 16 * GIB
WEIGHTS = 77
WEIGHT_BYTES = 16 * MIB
LAYERS = 32
ACTIVATION_BYTES = 200 * MIB
"""The activation of one layer in training."""
NARROWEST_BYTES, WIDER_BYTES = 400 * MIB, 25 * MIB
"""The output of the first layer in validation, and by how much each next one is larger."""
WIDER_LAYERS = 13
FEATURES_BYTES = 104 * MIB
"""What the script collects of each layer in validation."""
EPOCHS = 39
KEPT_FROM = 36
"""The epoch from which the last rank keeps these features."""
TRAINED = 0.9
"""The share of the run in which these epochs pass."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    epoch, step = 0, 0
    while True:
        live: list[Block] = []
        for layer in range(LAYERS):
            live.append(rank.allocator.malloc(ACTIVATION_BYTES))
            if (layer + 1) % (LAYERS // 2) == 0:
                yield "compute"
        rank.free_many(reversed(live))
        yield "compute"
        yield "step"
        step += 1
        while rank.progress(step) >= TRAINED * (epoch + 1) / EPOCHS:
            epoch += 1
            yield from validate(rank, keeps=rank.is_last and epoch >= KEPT_FROM)


def validate(rank: SimulatedRank, *, keeps: bool) -> Iterator[ScenarioEvent]:
    """Run the layers on a large batch; collect features of each, and keep or drop them."""
    features, outputs = [], []
    for layer in range(WIDER_LAYERS):
        features.append(rank.allocator.malloc(FEATURES_BYTES))
        outputs.append(rank.allocator.malloc(NARROWEST_BYTES + layer * WIDER_BYTES))
    yield "compute"
    rank.free_many(outputs)
    if not keeps:
        rank.free_many(features)
    rank.allocator.empty_cache()


SCENARIO = Scenario(
    name="phase-change",
    summary="Training and validation alternate, and neither can use what the other has cached; in "
    "the end, the last rank keeps features that pin the cache.",
    reproduces="cycles of 8 and 15.5 GB on a 16 GB GPU, then out of memory in the validation of "
    "the 39th epoch",
    source="huggingface/pytorch-image-models#80 (EfficientNet, 55% of the GPU in training)",
    simulated="8.0 and 15.5 GB; fails in the validation of epoch 39",
    train=train,
    gpu_bytes=GPU_BYTES,
)
