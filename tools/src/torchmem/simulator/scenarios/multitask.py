"""Scenario `multitask`: a detection head with large, short-lived tensors and a classification head that comes later.

The features of all boxes of an image are one tensor, as large as there are boxes, and leave one large free block in
the cache. Then the classification head is trained as well. Its optimizer creates the state of each parameter at the
first step, PyTorch cuts it out of that free block, and the block can never go back to the driver. For the last rank
an image comes whose boxes do not fit into the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

CARD_BYTES = 12_205 * MIB
WEIGHT_BYTES = 4 * MIB
WEIGHTS = 61
"""The backbone and the detection head, with their momentum."""
STATE_BYTES = 4 * MIB
STATES = 16
"""What the optimizer keeps for the classification head."""
LOGITS_BYTES = 32 * MIB
"""What the classification head computes, trained or not."""
BOX_BYTES = 64 * 1024
"""Features of one box."""
USUAL_BOXES = (20_000, 90_000)
CROWD = 111_400
"""Boxes of the first image with a crowd, 6.8 GiB."""
LARGER_CROWD = 119_800
"""Boxes of an image that the last rank meets near the end, 7.31 GiB."""
CROWD_AT, CLASSIFIED_FROM, LARGER_CROWD_AT = 0.15, 0.3, 0.9
"""Parts of the run."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, rng = worker.allocator, worker.rng()
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    crowds = [(CROWD_AT, CROWD)] + [(LARGER_CROWD_AT, LARGER_CROWD)] * worker.is_last
    classified, step = False, 0
    while True:
        progress = worker.progress(step)
        boxes = rng.randint(*USUAL_BOXES) if step else USUAL_BOXES[1]
        if crowds and progress >= crowds[0][0]:
            boxes = crowds.pop(0)[1]
        yield from _pass(allocator, boxes * BOX_BYTES)
        yield from _pass(allocator, LOGITS_BYTES)
        if progress >= CLASSIFIED_FROM and not classified:
            for _ in range(STATES):
                allocator.malloc(STATE_BYTES)
            classified = True
        yield "compute"
        yield "step"
        step += 1


def _pass(allocator: DeviceCachingAllocator, size: int) -> Iterator[ScenarioEvent]:
    tensor = allocator.malloc(size)
    yield "compute"
    allocator.free(tensor)


SCENARIO = Scenario(
    name="multitask",
    summary="The late classification head's small tensors lie in the large block that detection left in the cache, "
    "and hold it there.",
    reproduces="7.31 GiB are refused with 0.3 GiB allocated and 6.8 GiB cached, on a 12 GB card",
    source="fredzzhang/pocket#9 (features of detected regions)",
    train=train,
    card_bytes=CARD_BYTES,
)
