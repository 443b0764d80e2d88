"""Private pools: memory that only a `torch.cuda.MemPool`, or a CUDA graph, may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchmem.core.sizes import SMALL_SIZE
from torchmem.core.snapshot import DEFAULT_POOL, PoolId
from torchmem.simulator.blocks import Block, BlockPool
from torchmem.simulator.stats import DeviceStats, Stat

StreamFilter = Callable[[int], bool]


@dataclass(slots=True, eq=False)
class PrivatePool:
    """One private pool: its own free lists, and how many users it has.

    `use_count` is 1 for its `MemPool` and 1 more for each `use_mem_pool` block that is open; at 0 its cached memory
    may be given back. A pool with its own allocator (`MemPool(allocator)`) is not simulated.
    """

    id: PoolId
    stats: DeviceStats
    small_blocks: BlockPool
    large_blocks: BlockPool
    use_on_oom: bool = False
    no_split: bool = False
    use_count: int = 1

    def blocks(self, size: int) -> BlockPool:
        """The free blocks for a request of this rounded size."""
        return self.small_blocks if size <= SMALL_SIZE else self.large_blocks

    def reserved_bytes(self, *, is_small: bool) -> Stat:
        """The statistic of this pool that a segment of small or large blocks counts in."""
        reserved = self.stats.reserved_bytes_of(self.id)
        return reserved.small_pool if is_small else reserved.large_pool


@dataclass(slots=True, eq=False)
class PrivatePools:
    """All private pools of one device, and which requests go to them now."""

    stats: DeviceStats
    graph_pools: dict[PoolId, PrivatePool] = field(default_factory=dict)
    freeable: dict[PoolId, PrivatePool] = field(default_factory=dict)
    routes: list[tuple[PoolId, StreamFilter]] = field(default_factory=list)

    def create_or_incref_pool(self, pool_id: PoolId, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        """Create the pool with one user, or count one user more."""
        pool = self.graph_pools.get(pool_id)
        if pool is not None:
            pool.use_count += 1
            return
        stats = self.stats
        small = BlockPool(is_small=True, stats=stats.of_pool(is_small=True))
        large = BlockPool(is_small=False, stats=stats.of_pool(is_small=False))
        pool = PrivatePool(pool_id, stats, small, large, use_on_oom=use_on_oom, no_split=no_split)
        small.owner = large.owner = self.graph_pools[pool_id] = pool

    def begin_allocate_to_pool(self, pool_id: PoolId, accepts: StreamFilter) -> None:
        """Send requests on the streams that `accepts` names to the pool, and count one user more."""
        if any(pool_id == routed for routed, _ in self.routes):
            raise ValueError(f"beginAllocateToPool: already recording to mempool_id {pool_id}")
        self.create_or_incref_pool(pool_id)
        self.routes.append((pool_id, accepts))

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Send requests to the pool no longer; its count of users stays until `release_pool`."""
        remaining = [route for route in self.routes if route[0] != pool_id]
        if len(remaining) == len(self.routes):
            raise ValueError(f"endAllocatePool: not currently recording to mempool_id {pool_id}")
        self.routes = remaining

    def release_pool(self, pool_id: PoolId) -> None:
        """Count one user less; without a user its cached memory may be given back."""
        pool = self.graph_pools[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            pool.use_on_oom = False
            self.freeable[pool_id] = pool

    def use_on_oom(self) -> list[PrivatePool]:
        """The pools whose free blocks serve other requests when the driver refuses, the oldest first.

        With several of them PyTorch takes the order of a hash of their ids, which is not reproduced.
        """
        return [pool for pool in self.graph_pools.values() if pool.use_on_oom]

    def unused(self, pool_id: PoolId) -> list[PrivatePool]:
        """The pools without a user, or the one with this id if it has none."""
        return [pool for pool in self.freeable.values() if pool_id in (DEFAULT_POOL, pool.id)]

    def forget_if_empty(self, pool: PrivatePool) -> None:
        """Drop a pool that nobody uses if it holds no memory any more; its statistics stay.

        With expandable segments PyTorch 2.13 miscounts what such a pool holds: it may drop the pool, or abort, while
        blocks of it are in use. Here the pool stays until the last of them is gone.
        """
        reserved = self.stats.reserved_bytes_by_private_pools.get(pool.id)
        if reserved is None or not reserved.current:
            del self.graph_pools[pool.id], self.freeable[pool.id]

    def get_pool(self, size: int, stream: int) -> BlockPool | None:
        """The private pool that a request goes to, the one routed last if several claim it; None for the default."""
        for pool_id, accepts in reversed(self.routes):
            if accepts(stream):
                return self.graph_pools[pool_id].blocks(size)
        return None

    def free_blocks(self) -> Iterator[Block]:
        """The free blocks of all pools."""
        for pool in self.graph_pools.values():
            yield from pool.small_blocks
            yield from pool.large_blocks
