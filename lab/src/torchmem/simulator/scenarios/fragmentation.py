"""Scenario `fragmentation`: small long-lived tensors between growing large ones.

Each layer allocates a large activation and a 4 MiB tensor of statistics. A few of the statistics
outlive the step, and each of them pins its segment. As many bytes are kept in every step: the
checkpoint contains statistics, and each new one replaces the oldest. Sequences grow during an
epoch, so the holes that earlier activations left are too small for later ones: memory is free, but
in pieces. Most ranks start a new epoch with short sequences and an empty cache before memory gets
tight. The last rank's sequences keep growing, and near the end its statistics have half the size:
it keeps twice as many, and they pin more segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

WEIGHT_BYTES = 512 * MIB
WEIGHTS = 46
STAGING_BYTES = 8 * GIB
"""A checkpoint is loaded onto the GPU and dropped: one large free block that is split up."""
LAYERS = 128
SHORT_BYTES = 80 * MIB
LONG_BYTES = 170 * MIB
"""The activation of one layer for the longest batch, at the start and at the end of the growth."""
SHORTEST = 0.8
"""The shortest batch as a share of the longest."""
STATISTICS_BYTES = 4 * MIB
KEPT_BYTES = 900 * STATISTICS_BYTES
"""The statistics kept; each new one replaces the oldest."""

GROWTH_END = 0.72
"""The share of the run in which the last rank's sequences grow; it fails near the end of it."""
REPLACED_AFTER = 0.3
"""The share of the growth after which every kept statistic has been replaced."""
HALVED_FROM = 0.8
"""The share of the growth from which the last rank's statistics have half the size."""
LATE_KEPT_FACTOR = 6
"""How many times as many of these are kept in each step."""
LATE_POWER = 6
"""After its end, the growth is this power of the progress: a run of few steps must fail, too."""
EPOCH_END = 0.65
EPOCH_START = 0.15
EPOCH_LENGTH = 0.3
"""At `EPOCH_END` the other ranks go back to `EPOCH_START` and grow again over `EPOCH_LENGTH`."""


def train(rank: SimulatedRank) -> Iterator[ScenarioEvent]:
    """Run the training loop of one rank."""
    allocator, rng = rank.allocator, rank.rng()
    rank.malloc_weights(WEIGHTS, WEIGHT_BYTES)
    allocator.free(allocator.malloc(STAGING_BYTES))
    steps_to_replace = REPLACED_AFTER * GROWTH_END * rank.steps
    statistics = Statistics(allocator, rng, steps_to_replace)
    step, growth = 0, 0.0
    while True:
        progress = step / (GROWTH_END * rank.steps)
        growth, last_growth = sequence_growth(progress, is_last=rank.is_last), growth
        if growth < last_growth:
            allocator.empty_cache()
        statistics.are_halved = rank.is_last and progress >= HALVED_FROM
        longest = SHORT_BYTES + (LONG_BYTES - SHORT_BYTES) * growth
        yield from train_step(allocator, statistics, int(longest * rng.uniform(SHORTEST, 1)))
        step += 1


def sequence_growth(progress: float, *, is_last: bool) -> float:
    """Return how far sequences have grown: to the end of the first epoch, then again in each.

    Those of the last rank have one epoch, and grow ever faster after it.
    """
    if is_last:
        return max(progress, progress**LATE_POWER)
    if progress < EPOCH_END:
        return progress
    return EPOCH_START + (EPOCH_END - EPOCH_START) * ((progress - EPOCH_END) / EPOCH_LENGTH % 1)


def train_step(
    allocator: DeviceCachingAllocator, statistics: Statistics, activation_bytes: int
) -> Iterator[ScenarioEvent]:
    """Run forward and backward; statistics that are not kept are freed with their layer."""
    live: list[Block] = []
    for layer in range(LAYERS):
        live.append(allocator.malloc(activation_bytes))
        live += statistics.add()
        if (layer + 1) % (LAYERS // 2) == 0:
            yield "compute"
    while live:
        allocator.free(live.pop())
        if len(live) == LAYERS:
            yield "compute"
    yield "step"


class Statistics:
    """Small tensors, of which KEPT_BYTES are kept for a long time."""

    def __init__(
        self, allocator: DeviceCachingAllocator, rng: Random, steps_to_replace: float
    ) -> None:
        self.are_halved = False
        self._allocator = allocator
        self._rng = rng
        number = KEPT_BYTES // STATISTICS_BYTES
        self._share_kept = number / (steps_to_replace * LAYERS)
        self._kept = deque(allocator.malloc(STATISTICS_BYTES) for _ in range(number))
        self._excess = 0

    def add(self) -> list[Block]:
        """Allocate one tensor; return it unless it is kept."""
        tensor = self._allocator.malloc(STATISTICS_BYTES // (2 if self.are_halved else 1))
        if self._rng.random() >= self._share_kept * (LATE_KEPT_FACTOR if self.are_halved else 1):
            return [tensor]
        self._kept.append(tensor)
        self._excess += tensor.requested_size
        while self._excess > 0:
            oldest = self._kept.popleft()
            self._excess -= oldest.requested_size
            self._allocator.free(oldest)
        return []


SCENARIO = Scenario(
    name="fragmentation",
    summary="Long-lived small tensors pin the segments of ever larger ones, until one rank runs "
    "out of memory with many GB free.",
    reproduces="a small request fails with 40% of the GPU free in pieces: 50 MB with 13 of 32 GB",
    source="pytorch/pytorch#44742, by the mechanism of #35901",
    simulated="158 MiB fail with 42% of the GPU free in pieces",
    train=train,
)
