"""What the events of a trace show about the memory before it: age and slack of its blocks.

PyTorch orders free blocks of equal size by a number that no snapshot contains (`BlockOrder`), so a
trace that begins in the middle of a run lacks the order of what was there. But each allocation
shows which of several equal blocks came first. Where no allocation compares two blocks, their order
does not matter before the end of the trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush

from torchmem.allocator.settings import AllocatorConfig
from torchmem.simulator.blocks import BlockOrder
from torchmem.trace.recording import Recording
from torchmem.whatif.forced_replay import ForcedReplay, PlacedBlock
from torchmem.whatif.initial_memory import InitialMemory, rebuild

MAX_ROUNDS = 4
"""A round with known slack may find more; two were always enough."""


@dataclass(frozen=True, slots=True)
class Inference:
    """The memory before a trace as one order of free blocks explains it.

    `oldest_first` are the addresses of initial segments, or of blocks if the order is "block", by
    age. `contradictions` counts choices that no age explains, of `observations` compared pairs.
    """

    order: BlockOrder
    before: InitialMemory
    oldest_first: tuple[int, ...]
    observations: int
    contradictions: int


@dataclass(slots=True)
class AddressEvidence:
    """Whether the block at the lowest address was chosen."""

    observations: int = 0
    contradictions: int = 0

    def on_choice(self, chosen: PlacedBlock, rivals: Iterable[PlacedBlock]) -> None:
        """Compare addresses."""
        for rival in rivals:
            self.observations += 1
            self.contradictions += rival.address < chosen.address


@dataclass(slots=True)
class AgeEvidence:
    """Pairs of ages, the older one first, and how often they were seen.

    Ages are those of `PlacedBlock.segment`, or of `PlacedBlock.number` if `of_blocks`.
    """

    of_blocks: bool
    observations: int = 0
    contradictions: int = 0
    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)

    def on_choice(self, chosen: PlacedBlock, rivals: Iterable[PlacedBlock]) -> None:
        """Compare ages: those from before the trace are older than those within it."""
        older = chosen.number if self.of_blocks else chosen.segment
        for rival in rivals:
            self.observations += 1
            newer = rival.number if self.of_blocks else rival.segment
            if older < 0 and newer < 0 and older != newer:
                self.pairs[older, newer] += 1
            elif older == newer:  # within one segment, the lowest address comes first
                self.contradictions += rival.address < chosen.address
            elif older > 0:  # numbers from before the trace are below 0, and older
                self.contradictions += newer < older

    def sorted_ages(self, addresses: Mapping[int, int]) -> tuple[list[int], int]:
        """Return all initial ages, the oldest first, and the number of pairs that contradict it.

        Ages that no pair compares follow the direction of addresses that most pairs have.
        """
        upward = sum(1 if addresses[old] < addresses[new] else -1 for old, new in self.pairs)
        sign = 1 if upward > 0 else -1
        ages = topological_order(self.pairs, {age: sign * addresses[age] for age in addresses})
        position = {age: number for number, age in enumerate(ages)}
        opposed = sum(position[old] > position[new] for old, new in self.pairs)
        return ages, opposed


Evidence = AddressEvidence | AgeEvidence
NEW_EVIDENCE: Mapping[BlockOrder, Callable[[], Evidence]] = {
    "address": AddressEvidence,
    "segment": partial(AgeEvidence, of_blocks=False),
    "block": partial(AgeEvidence, of_blocks=True),
}
"""One for each order. The first of those that explain a recording counts: it assumes the least."""


def topological_order(pairs: Iterable[tuple[int, int]], ranks: Mapping[int, int]) -> list[int]:
    """Return the keys of `ranks` so that the first of each pair precedes the second.

    The lowest rank comes first where the pairs allow it. In a cycle of pairs, the lowest rank does.
    """
    followers, waits = defaultdict[int, list[int]](list), Counter[int]()
    for first, second in pairs:
        followers[first].append(second)
        waits[second] += 1
    ready = [(rank, key) for key, rank in ranks.items() if not waits[key]]
    heapify(ready)
    blocked = sorted((rank, key) for key, rank in ranks.items() if waits[key])
    blocked.reverse()
    ordered, done = list[int](), set[int]()
    while ready or blocked:
        key = (heappop(ready) if ready else blocked.pop())[1]
        if key in done:
            continue
        done.add(key)
        ordered.append(key)
        for follower in followers[key]:
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready, (ranks[follower], follower))
    return ordered


def infer(
    recording: Recording, config: AllocatorConfig, order: BlockOrder | None
) -> tuple[Inference, ...]:
    """Return what a recording shows under its order, or if that is unknown, under each order.

    The best explanation comes first.

    Raises:
        UsageError: the trace maps memory as no PyTorch does.
    """
    slack: dict[int, int] = {}
    for _ in range(MAX_ROUNDS):
        before = rebuild(recording, config, slack)
        evidence = {each: new() for each, new in NEW_EVIDENCE.items() if order in {None, each}}
        replay = ForcedReplay(before.segments, config, list(evidence.values()))
        replay.run(recording.events)
        if not replay.slack:
            break
        for address, size in replay.slack.items():
            slack[address] = slack.get(address, 0) + size
    inferred = [_conclude(replay, before, order, found) for order, found in evidence.items()]
    return tuple(sorted(inferred, key=lambda inference: inference.contradictions))


def _conclude(
    replay: ForcedReplay, before: InitialMemory, order: BlockOrder, evidence: Evidence
) -> Inference:
    contradictions, oldest_first = evidence.contradictions, tuple[int, ...]()
    if isinstance(evidence, AgeEvidence):
        addresses = replay.initial_blocks if evidence.of_blocks else replay.initial_segments
        ages, opposed = evidence.sorted_ages(addresses)
        contradictions += opposed
        oldest_first = tuple(addresses[age] for age in ages)
    return Inference(order, before, oldest_first, evidence.observations, contradictions)
