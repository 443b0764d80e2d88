"""Scenario `fragmentation`: long-lived small tensors between growing large ones, until a rank runs out of memory.

Each layer allocates a large activation and a 4 MiB tensor of statistics. A few of the statistics outlive the step,
and each of them pins the segment in which it lies. Sequences get longer during an epoch, so that the holes left by
the activations of earlier steps are too small for later ones: the free memory is there, in pieces nobody can use.
Most ranks start a new epoch with short sequences and an emptied cache before it gets too tight. The last rank's
sequences go on growing, and in the end it forgets to drop its statistics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.scenarios.scenario import Scenario, ScenarioEvent, Worker

WEIGHT_BYTES = 512 * MIB
WEIGHTS = 46
STAGING_BYTES = 8 * GIB
"""A checkpoint is loaded onto the card and dropped: a large free block, which the training then splinters."""
LAYERS = 128
SHORT_BYTES = 80 * MIB
LONG_BYTES = 170 * MIB
"""The activation of one layer for the longest batch, at the start of the arc and at its end."""
SHORTEST = 0.8
"""The shortest batch as a part of the longest."""
STATISTICS_BYTES = 4 * MIB
WINDOW = 900
"""How many statistics are kept, the oldest dropped for the newest."""

ARC = 0.72
"""The part of the run over which the last rank's sequences grow; it runs out of memory near the end of it."""
WINDOW_ARC = 0.3
"""The part of the arc after which every kept statistic has been replaced."""
UNTRIMMED_FROM = 0.8
"""From this part of the arc on the last rank keeps all statistics that it should drop."""
EPOCH_END = 0.65
EPOCH_START = 0.15
EPOCH_ARC = 0.3
"""At `EPOCH_END` of the growth the other ranks start a new epoch at `EPOCH_START`, and grow again over `EPOCH_ARC`."""


def train(worker: Worker) -> Iterator[ScenarioEvent]:
    """The training loop of one rank."""
    allocator, rng = worker.allocator, worker.rng()
    for _ in range(WEIGHTS):
        allocator.malloc(WEIGHT_BYTES)
    allocator.free(allocator.malloc(STAGING_BYTES))
    statistics = Statistics(allocator, rng, steps_to_replace=WINDOW_ARC * ARC * worker.steps)
    step, growth = 0, 0.0
    while True:
        arc = step / (ARC * worker.steps)
        growth, last_growth = (arc if worker.is_last else epoch_growth(arc)), growth
        if growth < last_growth:
            allocator.empty_cache()
        statistics.trimmed = not worker.is_last or arc < UNTRIMMED_FROM
        longest = SHORT_BYTES + (LONG_BYTES - SHORT_BYTES) * growth
        yield from train_step(allocator, statistics, int(longest * rng.uniform(SHORTEST, 1)))
        step += 1


def epoch_growth(arc: float) -> float:
    """How far the sequences have grown: up to the end of the first epoch, then again in each further epoch."""
    if arc < EPOCH_END:
        return arc
    return EPOCH_START + (EPOCH_END - EPOCH_START) * ((arc - EPOCH_END) / EPOCH_ARC % 1)


def train_step(
    allocator: DeviceCachingAllocator, statistics: Statistics, activation_bytes: int
) -> Iterator[ScenarioEvent]:
    """Forward and backward over all layers; statistics that are not kept are freed with their layer."""
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
    """Small tensors, a few of which are kept for a long time."""

    def __init__(
        self, allocator: DeviceCachingAllocator, rng: Random, steps_to_replace: float
    ) -> None:
        self.trimmed = True
        self._allocator = allocator
        self._rng = rng
        self._share_kept = WINDOW / (steps_to_replace * LAYERS)
        self._kept: deque[Block] = deque()

    def add(self) -> list[Block]:
        """Allocate one tensor; it is returned unless it is kept."""
        tensor = self._allocator.malloc(STATISTICS_BYTES)
        if self._rng.random() >= self._share_kept:
            return [tensor]
        self._kept.append(tensor)
        if self.trimmed and len(self._kept) > WINDOW:
            self._allocator.free(self._kept.popleft())
        return []


SCENARIO = Scenario(
    name="fragmentation",
    summary="Small tensors that live on pin the segments of ever larger ones: one rank runs out with GBs free.",
    reproduces="a small request is refused with 40 % of the card free in pieces: 50 MB with 13 of 32 GB",
    source="pytorch/pytorch#44742, in the way of #35901",
    train=train,
)
