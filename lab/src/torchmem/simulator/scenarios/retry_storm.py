"""Scenario `retry-storm`: two streams alternate, and neither can use the other's cache.

The tokens of a mixture of experts are exchanged on the communication stream; then the experts
compute on the compute stream. PyTorch never gives a cached block to another stream. While there is
room, both buffers stay in the cache. The activations grow with the epochs until there is no room,
and then the allocator releases the cache of one stream to serve the other, again and again.
Training never fails; it only gets slow.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 512 * MIB
BUFFER_BYTES = 8 * GIB
SMALLEST_BUFFER = 0.94
"""The buffer for the most even distribution of tokens as a share of that for the least even one."""
COMPUTE, COMMUNICATION = 0, 1
"""The streams."""
ROOM = (3.0, 1.95, 1.82)
"""What weights and activations leave for buffers in each epoch, in units of the largest buffer."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    allocator, rng = rank.allocator, rank.rng()
    held, step = 0, 0
    while True:
        epoch = min(int(rank.progress(step) * len(ROOM)), len(ROOM) - 1)
        needed = rank.capacity - ROOM[epoch] * BUFFER_BYTES
        if held < needed:
            allocator.empty_cache()
        while held < needed:
            allocator.malloc(WEIGHT_BYTES)
            held += WEIGHT_BYTES
        for stream in (COMMUNICATION, COMPUTE):
            buffer = allocator.malloc(int(BUFFER_BYTES * rng.uniform(SMALLEST_BUFFER, 1)), stream)
            yield "compute"
            allocator.free(buffer)
        yield "compute"
        yield "step"
        step += 1


SCENARIO = Scenario(
    name="retry-storm",
    summary="Two streams need a large buffer each and cannot use each other's cache: in the end "
    "two retries per step, but no error.",
    reproduces="two retries per step (the counter reads 5, 7, 9) at 91% reserved",
    source="pytorch/torchtitan#1558 (DeepSeek-v3 proxy)",
    simulated="2 retries in each step at 91% reserved",
    train=train,
)
