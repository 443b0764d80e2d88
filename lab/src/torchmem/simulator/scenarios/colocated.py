"""Scenario `colocated`: a generator shares each GPU with a trainer, which keeps what it freed.

In reinforcement learning, generation and training often take turns on one GPU, in two processes.
The rank is the generator. It holds weights and a cache of keys and values, and after each update
needs a buffer to receive the new weights. Each update's longest sequence is a little longer than
any before, so that the logits need a new segment, and the one of the last update stays in the
trainer's cache. The trainers of the other ranks empty their cache after each update. That of the
last rank does not, until its generator gets no buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.gpu import CONTEXT_BYTES, SimulatedGpu
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

GPU_BYTES = 80 * GIB
BUFFER_BYTES = 970 * MIB
"""The buffer in which the generator receives weights."""
LEFT_BYTES = 758 * MIB
"""What is free on the GPU of the last rank when it asks for the last time."""
TENSORS = 57
TENSOR_BYTES = 524 * MIB
"""Weights, gradients, optimizer state and activations of the trainer, without the logits."""
LOGITS_BYTES = 1104 * MIB
"""The logits at the last update, whose weights are not received."""
UPDATES = 9
GROWTH_BYTES = 18 * MIB
"""How much larger the logits are than those of the update before."""
CACHE_BYTES = 32 * MIB
"""A piece of the generator's cache of keys and values."""
TRAINED = 0.9
"""The share of the run in which the updates happen."""


def logits_bytes(update: int) -> int:
    """Return the size of the logits of an update."""
    return LOGITS_BYTES - GROWTH_BYTES * max(0, UPDATES - 1 - update)


class Trainer:
    """The trainer of a rank: another process on its GPU, with an allocator of its own."""

    def __init__(self, rank: SimulatedRank) -> None:
        gpu = rank.allocator.gpu
        (use,) = gpu.use.others()
        own_gpu = SimulatedGpu(gpu.total_bytes, CONTEXT_BYTES, use=use)
        self.allocator = DeviceCachingAllocator(own_gpu)
        self._keeps_cache = rank.is_last
        for _ in range(TENSORS):
            self.allocator.malloc(TENSOR_BYTES)

    def update(self, number: int) -> None:
        """Train on the generated sequences."""
        self.allocator.free(self.allocator.malloc(logits_bytes(number)))
        if not self._keeps_cache:
            self.allocator.empty_cache()


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the loop of one rank: generate, let the trainer work, and receive its weights."""
    trainer = Trainer(rank)
    trained = TENSORS * TENSOR_BYTES + sum(map(logits_bytes, range(UPDATES)))
    own = rank.capacity - CONTEXT_BYTES - trained - LEFT_BYTES
    rank.malloc_many(own // CACHE_BYTES, CACHE_BYTES)
    rank.allocator.malloc(own % CACHE_BYTES)
    update, step = 0, 0
    while True:
        for _ in range(3):
            yield "compute"
        if rank.progress(step) >= TRAINED * (update + 1) / UPDATES:
            trainer.update(update)
            buffer = rank.allocator.malloc(BUFFER_BYTES)
            yield "compute"
            rank.allocator.free(buffer)
            rank.allocator.empty_cache()
            update += 1
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="colocated",
    summary="On each GPU, a trainer in another process keeps freed memory in its cache, until the "
    "last rank, a generator, cannot allocate a buffer for the new weights.",
    reproduces="the trainer's reserved memory climbs from 30.1 to 34.0 GiB in five steps and to "
    "38.2 in nine, and a request for 970 MiB fails in the other process with 758 free",
    source="agentscope-ai/Trinity-RFT#541 (vLLM beside FSDP)",
    simulated="30.1, 34.0 and 38.2 GiB; 970 MiB fail with 758 free",
    train=train,
    gpu_bytes=GPU_BYTES,
    neighbors=1,
)
