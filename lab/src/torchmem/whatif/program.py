"""What a recorded run did to its allocator: instructions in columns, as a trace has millions."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum

from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId


class Operation(IntEnum):
    """What a program does to an allocator.

    TRY_MALLOC is a request that failed in the recording. If it succeeds in the replay, the block is
    freed at once, because how long it would have been held is unknown. FREE_LATER and COMPLETE free
    a block that other streams used, in two parts. RELEASE_POOL removes the last user of a private
    pool, and EMPTY_POOL releases its cache.
    """

    MALLOC = 0
    TRY_MALLOC = 1
    FREE = 2
    FREE_LATER = 3
    COMPLETE = 4
    EMPTY_CACHE = 5
    RELEASE_POOL = 6
    EMPTY_POOL = 7


Instruction = tuple[int, int, int, int, int, PoolId]
"""Operation, event number, recorded address, requested bytes, stream and pool."""


class Program:
    """Instructions in order; iterate over it to get each of them.

    Attributes:
        operations: the operation of each instruction; likewise numbers, addresses, sizes, streams.
        pools: the pool of each instruction, as an index into `pool_ids`.
        pool_ids: the default pool, and the private pools of all requests.
    """

    def __init__(self) -> None:
        self.operations = array("B")
        self.numbers, self.addresses = array("q"), array("Q")
        self.sizes, self.streams = array("Q"), array("q")
        self.pools = array("i")
        self._indexes: dict[PoolId, int] = {DEFAULT_POOL: 0}

    def append(self, instruction: Instruction) -> None:
        """Add an instruction at the end."""
        operation, number, address, size, stream, pool = instruction
        self.operations.append(operation)
        self.numbers.append(number)
        self.addresses.append(address)
        self.sizes.append(size)
        self.streams.append(stream)
        self.pools.append(self._indexes.setdefault(pool, len(self._indexes)))

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Instruction]:
        pools = map(self.pool_ids.__getitem__, self.pools)
        places = self.numbers, self.addresses, self.sizes, self.streams
        return zip(self.operations, *places, pools, strict=True)

    @property
    def pool_ids(self) -> tuple[PoolId, ...]:
        """The default pool, and the private pools that instructions name."""
        return tuple(self._indexes)
