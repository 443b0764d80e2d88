"""The private pools of one device, and which requests go to them.

A private pool is memory that only a `torch.cuda.MemPool` or a CUDA graph may use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId
from torchmem.simulator.blocks import Block, BlockPool, PrivatePool
from torchmem.simulator.stats import DeviceStats

StreamFilter = Callable[[int], bool]
"""Decides whether requests on a stream go to a private pool."""


@dataclass(slots=True, eq=False)
class PrivatePools:
    """All private pools of one device; `routes` lists the pools that receive requests.

    `numbers` is that of their `BlockPool`s.
    """

    stats: DeviceStats
    numbers: Iterator[int] | None = None
    graph_pools: dict[PoolId, PrivatePool] = field(default_factory=dict)
    freeable: dict[PoolId, PrivatePool] = field(default_factory=dict)
    routes: list[tuple[PoolId, StreamFilter]] = field(default_factory=list)

    def create_or_incref_pool(
        self, pool_id: PoolId, *, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Create the pool with one user, or add a user to an existing pool."""
        pool = self.graph_pools.get(pool_id)
        if pool is not None:
            pool.use_count += 1
            return
        stats = self.stats
        numbers = self.numbers
        small = BlockPool(is_small=True, device_stats=stats, numbers=numbers)
        large = BlockPool(is_small=False, device_stats=stats, numbers=numbers)
        pool = PrivatePool(pool_id, stats, small, large, use_on_oom=use_on_oom, no_split=no_split)
        small.owner = large.owner = self.graph_pools[pool_id] = pool

    def begin_allocate_to_pool(self, pool_id: PoolId, accepts: StreamFilter) -> None:
        """Route requests on the streams that `accepts` matches to the pool, and add a user."""
        if any(pool_id == routed for routed, _ in self.routes):
            raise ValueError(f"beginAllocateToPool: already recording to mempool_id {pool_id}")
        self.create_or_incref_pool(pool_id)
        self.routes.append((pool_id, accepts))

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop routing requests to the pool; its user remains until `release_pool`."""
        remaining = [route for route in self.routes if route[0] != pool_id]
        if len(remaining) == len(self.routes):
            raise ValueError(f"endAllocatePool: not currently recording to mempool_id {pool_id}")
        self.routes = remaining

    def release_pool(self, pool_id: PoolId) -> None:
        """Remove a user; the cached memory of a pool without users may go back to the driver."""
        pool = self.graph_pools[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            pool.use_on_oom = False
            self.freeable[pool_id] = pool

    def use_on_oom(self) -> list[PrivatePool]:
        """Return the pools that serve any request if the driver refuses, the oldest first.

        PyTorch orders several of them by a hash of their ids, which is not reproduced here.
        """
        return [pool for pool in self.graph_pools.values() if pool.use_on_oom]

    def unused(self, pool_id: PoolId) -> list[PrivatePool]:
        """Return the pool with this id if it has no user; all such pools for `DEFAULT_POOL`."""
        return [pool for pool in self.freeable.values() if pool_id in (DEFAULT_POOL, pool.id)]

    def forget_if_empty(self, pool: PrivatePool) -> None:
        """Drop a pool without users if it holds no memory; its statistics remain.

        With expandable segments, PyTorch 2.13 miscounts the memory of such a pool: it may drop the
        pool, or abort, while some of its blocks are in use. Here the pool remains until the last
        block is gone.
        """
        reserved = self.stats.reserved_bytes_by_private_pools.get(pool.id)
        if reserved is None or not reserved.current:
            del self.graph_pools[pool.id], self.freeable[pool.id]

    def get_pool(self, size: int, stream: int) -> BlockPool | None:
        """Return the pool of the latest route that matches, or None for the default pools."""
        for pool_id, accepts in reversed(self.routes):
            if accepts(stream):
                return self.graph_pools[pool_id].blocks(size)
        return None

    def free_blocks(self) -> Iterator[Block]:
        """Iterate over the free blocks of all pools."""
        for pool in self.graph_pools.values():
            yield from pool.small_blocks
            yield from pool.large_blocks
