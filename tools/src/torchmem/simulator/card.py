"""A simulated card and its driver: cudaMalloc, cudaFree and cudaMemGetInfo on a number of bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchmem.allocator.sizes import GIB, MIB

CARD_BYTES = 80 * GIB
CONTEXT_BYTES = 512 * MIB
"""Device memory of a CUDA context; 200 to 700 MB are reported from the field (pytorch/pytorch#28113)."""
FIRST_ADDRESS = 0x7_0000_0000
ALIGNMENT = 2 * MIB
"""The driver hands out whole pages of 2 MiB."""


class Cells(Protocol):
    """Integers by position: a list, or a `multiprocessing.Array("Q", n)` that several processes share."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class CardUse:
    """The bytes that each process uses on one card: one cell for each process, `slot` is ours.

    Several processes share a card through `multiprocessing.Array("Q", n)` as `cells` and its `get_lock()` as `lock`.
    Whoever started a process sets its cell to 0 when it has died, as the driver would.
    """

    cells: Cells = field(default_factory=lambda: [0])
    slot: int = 0
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)

    def total(self) -> int:
        """Bytes that all processes use."""
        return sum(self.cells[index] for index in range(len(self.cells)))

    def own(self) -> int:
        """Bytes that this process uses."""
        return self.cells[self.slot]

    def others(self) -> list[CardUse]:
        """The other processes' sides of the card."""
        return [replace(self, slot=slot) for slot in range(len(self.cells)) if slot != self.slot]

    def claim(self, size: int, capacity: int) -> bool:
        """Add `size` bytes to our cell if all processes together then stay within `capacity`."""
        with self.lock:
            fits = self.total() + size <= capacity
            if fits:
                self.cells[self.slot] += size
            return fits

    def give_back(self, size: int) -> None:
        """Take `size` bytes out of our cell."""
        with self.lock:
            self.cells[self.slot] -= size


class SimulatedCard:
    """One process's view of a card, with its CUDA context on it.

    The driver is ideal: it refuses only what does not fit in the sum, and never gives an address twice.
    """

    def __init__(
        self,
        total_bytes: int = CARD_BYTES,
        context_bytes: int = CONTEXT_BYTES,
        *,
        use: CardUse | None = None,
        uuid: str | None = None,
        name: str | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.uuid = uuid
        self.name = name
        self.use = use or CardUse()
        self.events_held = False
        self._sizes: dict[int, int] = {}
        self._next_address = FIRST_ADDRESS
        if not self.use.claim(context_bytes, total_bytes):
            msg = f"CUDA error: out of memory. The card has no {context_bytes} bytes left for a context."
            raise RuntimeError(msg)

    def cuda_malloc(self, size: int) -> int | None:
        """Address of `size` new bytes, or None for cudaErrorMemoryAllocation."""
        if not self.use.claim(size, self.total_bytes):
            return None
        address = self.reserve_addresses(size)
        self._sizes[address] = size
        return address

    def cuda_free(self, address: int) -> None:
        """Give back what `cuda_malloc` returned."""
        self.use.give_back(self._sizes.pop(address))

    def adopt(self, address: int, size: int) -> None:
        """Count memory that was given out before, so that `cuda_free` takes it back.

        Raises:
            ValueError: the card has not so much.
        """
        if not self.use.claim(size, self.total_bytes):
            raise ValueError(f"the card has no {size} bytes left for the segment at {address:#x}")
        self._sizes[address] = size

    def reserve_addresses(self, size: int) -> int:
        """Where `size` bytes of address space begin, without memory, like cuMemAddressReserve."""
        address = self._next_address
        self._next_address += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    def mem_create(self, size: int) -> bool:
        """Take `size` bytes of memory to map at reserved addresses, like cuMemCreate; False when there are not so many.

        The pages of one mapping are taken together or not at all, as `ExpandableSegment::map` does.
        """
        return self.use.claim(size, self.total_bytes)

    def mem_unmap(self, size: int) -> None:
        """Give back what `mem_create` took, or a part of it."""
        self.use.give_back(size)

    def hold_events(self, hold: bool) -> None:
        """Let every event answer that it is not done yet, until this is called with False."""
        self.events_held = hold

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the card, like cudaMemGetInfo."""
        return max(0, self.total_bytes - self.use.total()), self.total_bytes
