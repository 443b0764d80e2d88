"""Random programs for an allocator, and the simulated allocator that runs them.

An operation is a list of its name and its numbers, so that a program is valid JSON.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block, BlockOrder
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu

Operation = list[Any]
Outcome = int | str | None
"""The address of the new block, the text of the OutOfMemoryError, or None."""


MAX_POOLS = 3
SIZES = [
    (1, 4096),
    (1, MIB),
    (1, MIB),
    (MIB, 4 * MIB),
    (MIB, 10 * MIB),
    (MIB, 10 * MIB),
    (MIB, 24 * MIB),
    (8 * MIB, GIB),
]


@dataclass(frozen=True)
class Setting:
    """The settings, memory fraction and GPU of a program, and the streams and pools it may use."""

    conf: str = ""
    fraction: float = 1.0
    gpu: int = 1536 * MIB
    streams: int = 1
    pools: bool = False
    largest: int = 130 * MIB


SETTINGS = {
    "default": Setting(streams=2),
    "small_blocks": Setting(gpu=640 * MIB, streams=2, largest=3 * MIB),
    "fraction": Setting(fraction=0.45, streams=2),
    "max_split": Setting("max_split_size_mb:64", streams=2),
    "non_split_rounding": Setting(
        "max_split_size_mb:48,max_non_split_rounding_mb:40", fraction=0.9
    ),
    "roundup": Setting("roundup_power2_divisions:4", streams=2),
    "roundup_list": Setting("roundup_power2_divisions:[2:1,16:8,64:4,>:2]"),
    "garbage_collection": Setting("garbage_collection_threshold:0.6", fraction=0.8, streams=2),
    "garbage_collection_events": Setting(
        "garbage_collection_threshold:0.5,max_split_size_mb:96", 0.7, streams=3
    ),
    "large_segments": Setting("large_segment_size_mb:40"),
    "large_segments_max_split": Setting("large_segment_size_mb:40,max_split_size_mb:48"),
    "expandable": Setting("expandable_segments:True", streams=2),
    "expandable_fraction": Setting(
        "expandable_segments:True,large_segment_size_mb:32", fraction=0.5, streams=2
    ),
    "expandable_max_split": Setting(
        "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:2"
    ),
    "expandable_events": Setting("expandable_segments:True", streams=4),
    "streams": Setting(streams=4),
    "pools": Setting(streams=3, pools=True),
    "pools_roundup": Setting(
        "roundup_power2_divisions:8,garbage_collection_threshold:0.7", 0.8, streams=2, pools=True
    ),
    "expandable_ranges": Setting("expandable_segments:True", streams=2, largest=700 * MIB),
    "expandable_pools": Setting(
        "expandable_segments:True", streams=2, pools=True, largest=40 * MIB
    ),
    "configured_fraction": Setting("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"),
    "rejections": Setting("throw_on_cudamalloc_oom:True", streams=2, largest=700 * MIB),
}
"""Settings by name; a program under any of them runs out of memory now and then."""


@dataclass
class Programmer:
    """Generates a program operation by operation, depending on the previous outcomes.

    At most one pool, `overflow`, has `use_on_oom`, because the order of several is not simulated. A
    pool with expandable segments is never dropped, because PyTorch 2.13 then aborts or writes into
    freed memory. It also never has `no_split`, because one small block would soon hold all memory.
    """

    setting: Setting
    chance: random.Random
    live: list[int] = field(default_factory=list)
    pools: list[int] = field(default_factory=list)
    routed: list[int] = field(default_factory=list)
    held: bool = False
    slots: int = 0
    made_pools: int = 0
    overflow: int = 0
    growth: float = 0.55
    palette: list[int] = field(default_factory=list)

    def next(self) -> Operation:
        """Return the next operation."""
        chance = self.chance
        if not self.palette or chance.random() < 0.005:
            self.growth = chance.uniform(0.45, 0.75)
            self.palette = [self._fresh_size() for _ in range(6)]
        roll = chance.random()
        if roll < 0.006:
            return [
                chance.choice(["empty_cache", "empty_cache", "reset_peak", "reset_accumulated"])
            ]
        if roll < 0.05 and self.setting.pools:
            return self._pool_operation()
        if roll < 0.07 and self.setting.streams > 1:
            self.held = not self.held and chance.random() < 0.7
            return ["hold_events", int(self.held)]
        if roll < 0.15 and self.setting.streams > 1 and self.live:
            return [
                "record_stream",
                chance.choice(self.live),
                chance.randrange(self.setting.streams),
            ]
        if self.live and chance.random() > self.growth:
            return ["free", self.live.pop(chance.randrange(len(self.live)))]
        self.slots += 1
        stream = 0 if chance.random() < 0.6 else chance.randrange(self.setting.streams)
        return ["malloc", self.slots, self._size(), stream]

    def learn(self, operation: Operation, outcome: Outcome) -> None:
        """Record the outcome of an operation."""
        if isinstance(outcome, int):
            self.live.append(operation[1])
        elif isinstance(outcome, str):
            self.growth = self.chance.uniform(0.3, 0.5)

    def _size(self) -> int:
        return (
            self.chance.choice(self.palette) if self.chance.random() < 0.4 else self._fresh_size()
        )

    def _fresh_size(self) -> int:
        chance = self.chance
        low, high = chance.choice(SIZES)
        size = chance.randint(min(low, self.setting.largest // 2), min(high, self.setting.largest))
        return size if chance.random() < 0.7 else max(1, size // MIB * MIB)

    def _pool_operation(self) -> Operation:
        chance = self.chance
        if self.routed and chance.random() < 0.8:
            return ["end_pool", self.routed.pop(chance.randrange(len(self.routed)))]
        idle = [pool for pool in self.pools if pool not in self.routed]
        if len(self.pools) < MAX_POOLS and (not idle or chance.random() < 0.3):
            return self._make_pool()
        if not idle:
            return ["empty_cache"]
        pool = chance.choice(idle)
        may_drop = "expandable_segments" not in self.setting.conf
        return self._drop(pool) if may_drop and chance.random() < 0.2 else self._route(pool)

    def _make_pool(self) -> Operation:
        self.made_pools += 1
        self.pools.append(self.made_pools)
        use_on_oom = self.overflow not in self.pools and self.chance.random() < 0.6
        self.overflow = self.made_pools if use_on_oom else self.overflow
        no_split = "expandable_segments" not in self.setting.conf and self.chance.random() < 0.3
        return ["make_pool", self.made_pools, int(use_on_oom), int(no_split)]

    def _route(self, pool: int) -> Operation:
        self.routed.append(pool)
        return ["begin_pool", pool]

    def _drop(self, pool: int) -> Operation:
        self.pools.remove(pool)
        return ["drop_pool", pool]


class PlainPools(Programmer):
    """Creates pools without `use_on_oom` and `no_split`, which a snapshot does not record."""

    def _make_pool(self) -> Operation:
        name, pool, *_ = super()._make_pool()
        self.overflow = 0
        return [name, pool, 0, 0]


class FollowingGpu(SimulatedGpu):
    """Uses the addresses of the other allocator's driver, if they are set before each operation."""

    newest_range = 0

    def reserve_addresses(self, size: int) -> int:
        return self.newest_range or super().reserve_addresses(size)


class Simulated:
    """The simulated allocator, controlled by operations."""

    def __init__(self, setting: Setting, order: BlockOrder = "segment") -> None:
        self.gpu = FollowingGpu(setting.gpu)
        self.allocator = DeviceCachingAllocator(
            self.gpu, config=AllocatorConfig.parse(setting.conf), order=order
        )
        if setting.fraction < 1:
            self.allocator.set_memory_fraction(setting.fraction)
        self.blocks: dict[int, Block] = {}

    def run(self, operation: Operation) -> Outcome:
        """Run one operation."""
        name, *numbers = operation
        result: Outcome = getattr(self, f"_{name}")(*numbers)
        return result

    def stats(self) -> dict[str, Any]:
        """Return all statistics."""
        return self.allocator.memory_stats_as_nested_dict()

    def snapshot(self) -> list[SegmentInfo]:
        """Return all segments."""
        return self.allocator.memory_snapshot()

    def driver(self) -> tuple[int, int]:
        """Return the free and total bytes of the GPU."""
        return self.gpu.mem_get_info()

    def _malloc(self, slot: int, size: int, stream: int) -> Outcome:
        try:
            block = self.blocks[slot] = self.allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            return str(error)
        return block.address

    def _free(self, slot: int) -> None:
        self.allocator.free(self.blocks.pop(slot))

    def _record_stream(self, slot: int, stream: int) -> None:
        self.allocator.record_stream(self.blocks[slot], stream)

    def _hold_events(self, hold: int) -> None:
        self.gpu.hold_events(bool(hold))

    def _empty_cache(self) -> None:
        self.allocator.empty_cache()

    def _reset_peak(self) -> None:
        self.allocator.reset_peak_memory_stats()

    def _reset_accumulated(self) -> None:
        self.allocator.reset_accumulated_memory_stats()

    def _make_pool(self, pool: int, use_on_oom: int, no_split: int) -> None:
        self.allocator.create_or_incref_pool(
            (0, pool), use_on_oom=bool(use_on_oom), no_split=bool(no_split)
        )

    def _begin_pool(self, pool: int) -> None:
        self.allocator.begin_allocate_to_pool((0, pool))

    def _end_pool(self, pool: int) -> None:
        self.allocator.end_allocate_to_pool((0, pool))
        self.allocator.release_pool((0, pool))

    def _drop_pool(self, pool: int) -> None:
        self.allocator.release_pool((0, pool))
        self.allocator.empty_cache((0, pool))
