"""A simulated GPU and its driver: cudaMalloc, cudaFree, virtual memory and cudaMemGetInfo."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchmem.allocator.sizes import GIB, MIB

GPU_BYTES = 80 * GIB
CONTEXT_BYTES = 512 * MIB
"""Device memory of a CUDA context; users report 200 to 700 MB (pytorch/pytorch#28113)."""
ALIGNMENT = 2 * MIB
"""The driver allocates whole pages of 2 MiB."""


class Cells(Protocol):
    """Integers by position: a list, or a `multiprocessing.Array("Q", n)` shared by processes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The bytes that each process uses on one GPU: one cell per process, this process at `slot`.

    To share a GPU, give each process a `multiprocessing.Array("Q", n)` as `cells` and its
    `get_lock()` as `lock`. The parent of a process sets its cell to 0 after the process has died,
    as the driver would free its memory.
    """

    cells: Cells = field(default_factory=lambda: [0])
    slot: int = 0
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)

    def total(self) -> int:
        """Return the bytes that all processes use."""
        return sum(self.cells[index] for index in range(len(self.cells)))

    def own(self) -> int:
        """Return the bytes that this process uses."""
        return self.cells[self.slot]

    def others(self) -> list[GpuUse]:
        """Return the same GPU as seen by each of the other processes."""
        return [replace(self, slot=slot) for slot in range(len(self.cells)) if slot != self.slot]

    def claim(self, size: int, capacity: int) -> bool:
        """Add `size` bytes to this process if all processes together then fit in `capacity`.

        Raise ValueError if `size` is below zero.
        """
        if size < 0:
            raise ValueError(f"a process cannot allocate {size} bytes")
        with self.lock:
            fits = self.total() + size <= capacity
            if fits:
                self.cells[self.slot] += size
            return fits

    def release(self, size: int) -> None:
        """Subtract `size` bytes from this process. Raise ValueError if it uses fewer."""
        with self.lock:
            if not 0 <= size <= self.own():
                raise ValueError(f"a process that uses {self.own()} bytes cannot free {size}")
            self.cells[self.slot] -= size


class SimulatedGpu:
    """A GPU as one process sees it, with the CUDA context of that process.

    The driver is ideal: it refuses memory only if the sum does not fit, and never reuses an
    address. Addresses are assigned upward from `first_address`.
    """

    first_address = 0x7_0000_0000

    def __init__(
        self,
        total_bytes: int = GPU_BYTES,
        context_bytes: int = CONTEXT_BYTES,
        *,
        use: GpuUse | None = None,
        uuid: str | None = None,
        name: str | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.uuid = uuid
        self.name = name
        self.use = use or GpuUse()
        self.events_held = False
        self._sizes: dict[int, int] = {}
        self.next_address = self.first_address
        if not self.use.claim(context_bytes, total_bytes):
            raise RuntimeError(
                "CUDA error: out of memory. "
                f"The GPU has no {context_bytes} bytes left for a context."
            )

    def cuda_malloc(self, size: int) -> int | None:
        """Return the address of `size` new bytes, or None for cudaErrorMemoryAllocation."""
        if not self.use.claim(size, self.total_bytes):
            return None
        address = self.reserve_addresses(size)
        self._sizes[address] = size
        return address

    def cuda_free(self, address: int) -> None:
        """Free memory that `cuda_malloc` returned."""
        self.use.release(self._sizes.pop(address))

    def adopt(self, address: int, size: int) -> None:
        """Count memory that was allocated before, so that `cuda_free` accepts it.

        Raises:
            ValueError: the GPU has too little memory.
        """
        if not self.use.claim(size, self.total_bytes):
            raise ValueError(f"the GPU has no {size} bytes left for the segment at {address:#x}")
        self._sizes[address] = size

    def reserve_addresses(self, size: int) -> int:
        """Reserve `size` bytes of address space, like cuMemAddressReserve; return its start."""
        address = self.next_address
        self.next_address += -(-size // ALIGNMENT) * ALIGNMENT
        return address

    def mem_map(self, address: int, size: int) -> bool:  # noqa: ARG002 -- for subclasses
        """Map `size` bytes of new memory at a reserved address, like cuMemCreate and cuMemMap.

        Return False if the GPU has too little memory. The pages of one call are mapped together or
        not at all, as `ExpandableSegment::map` does.
        """
        return self.use.claim(size, self.total_bytes)

    def mem_unmap(self, address: int, size: int) -> None:  # noqa: ARG002 -- for subclasses
        """Unmap and free memory that `mem_map` mapped, or a part of it."""
        self.use.release(size)

    def hold_events(self, hold: bool) -> None:
        """Report every CUDA event as pending until this is called again with False."""
        self.events_held = hold

    def mem_get_info(self) -> tuple[int, int]:
        """Return the free and total bytes of the GPU, like cudaMemGetInfo."""
        with self.use.lock:
            return self.total_bytes - self.use.total(), self.total_bytes
