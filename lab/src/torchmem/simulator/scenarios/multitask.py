"""Scenario `multitask`: a detection head with large, short-lived tensors, and a late second head.

The features of all boxes of an image are one tensor, whose size depends on the number of boxes; it
leaves one large free block in the cache. Then the classification head is trained as well. Its
optimizer creates the state of each parameter in the first step, PyTorch splits it off that free
block, and the block can no longer go back to the driver. The last rank meets an image whose boxes
do not fit into the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

GPU_BYTES = 12_205 * MIB
WEIGHT_BYTES = 4 * MIB
WEIGHTS = 61
"""The backbone and the detection head, with their momentum."""
STATE_BYTES = 4 * MIB
STATES = 16
"""The optimizer state of the classification head."""
LOGITS_BYTES = 32 * MIB
"""The output of the classification head, trained or not."""
BOX_BYTES = 64 * 1024
"""Features of one box."""
USUAL_BOXES = (20_000, 90_000)
CROWD = 111_400
"""Boxes of the first crowded image: 6.8 GiB."""
LARGER_CROWD = 119_800
"""Boxes of an image that the last rank meets near the end: 7.31 GiB."""
CROWD_AT, CLASSIFIED_FROM, LARGER_CROWD_AT = 0.15, 0.3, 0.9
"""Shares of the run."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    allocator, rng = rank.allocator, rank.rng()
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    crowds = [(CROWD_AT, CROWD)] + [(LARGER_CROWD_AT, LARGER_CROWD)] * rank.is_last
    classified, step = False, 0
    while True:
        progress = rank.progress(step)
        boxes = rng.randint(*USUAL_BOXES) if step else USUAL_BOXES[1]
        if crowds and progress >= crowds[0][0]:
            boxes = crowds.pop(0)[1]
        yield from _compute(allocator, boxes * BOX_BYTES)
        yield from _compute(allocator, LOGITS_BYTES)
        if progress >= CLASSIFIED_FROM and not classified:
            rank.malloc_many(STATES, STATE_BYTES)
            classified = True
        yield "compute"
        yield "step"
        step += 1


def _compute(allocator: DeviceCachingAllocator, size: int) -> Iterator[ScenarioEvent]:
    tensor = allocator.malloc(size)
    yield "compute"
    allocator.free(tensor)


SCENARIO = Scenario(
    name="multitask",
    summary="Small tensors of a classification head, which runs late, lie in the large block that "
    "detection left in the cache, and pin it.",
    reproduces="7.31 GiB fail with 0.3 GiB allocated and 6.8 GiB cached, on a 12 GB GPU",
    source="fredzzhang/pocket#9 (features of detected regions)",
    simulated="7.31 GiB fail with 0.30 GiB allocated, 6.75 stranded, 4.36 free",
    effects="fragmentation is near 0, because there is one large free block; stranded memory jumps "
    "by its size, and the last rank fails of fragmentation",
    train=train,
    gpu_bytes=GPU_BYTES,
)
