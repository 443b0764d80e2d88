"""The simulator's OutOfMemoryError, with the numbers and the wording of PyTorch's message."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.allocator.sizes import GIB


@dataclass(frozen=True, slots=True)
class OutOfMemoryDetails:
    """The numbers in PyTorch's out-of-memory message, in bytes.

    `requested` is rounded up to a whole segment. `allowed` is the limit set by a memory fraction,
    or None. `process` includes the CUDA context. `allocated` includes the `private` free bytes that
    only private pools may use. `rejected` is True if `throw_on_cudamalloc_oom` rejected the request
    without asking the driver.
    """

    device: int
    requested: int
    total: int
    free: int
    process: int
    allowed: int | None
    allocated: int
    unallocated: int
    private: int = 0
    rejected: bool = False

    def __str__(self) -> str:
        if self.rejected:
            return (
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                "per_process_memory_fraction limit. "
                f"Requested size: {_size(self.requested)}"
            )
        allowed = "" if self.allowed is None else f"{_size(self.allowed)} allowed; "
        private = ""
        if self.private:
            size = _size(self.private)
            private = f"with {size} allocated in private pools (e.g., CUDA Graphs), "
        return (
            f"CUDA out of memory. Tried to allocate {_size(self.requested)}. "
            f"GPU {self.device} has a total capacity of {_size(self.total)} "
            f"of which {_size(self.free)} is free. Including non-PyTorch memory, "
            f"this process has {_size(self.process)} memory in use. "
            f"{allowed}Of the allocated memory {_size(self.allocated)} is allocated "
            f"by PyTorch, {private}and {_size(self.unallocated)} is reserved by PyTorch "
            "but unallocated."
        )


class OutOfMemoryError(RuntimeError):
    """The simulator's `torch.OutOfMemoryError`: no free block fits and the driver has no memory."""

    def __init__(self, details: OutOfMemoryDetails) -> None:
        super().__init__(details)
        self.details = details


def _size(size: int) -> str:
    """Format `size` as PyTorch's `format_size` (c10/cuda/CUDACachingAllocator.cpp, 2.13)."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if size <= 1 << (shift + 10):
            return f"{size / (1 << shift):.2f} {unit}"
    return f"{size / GIB:.2f} GiB"
