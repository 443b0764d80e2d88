"""The simulated OutOfMemoryError, with the numbers of PyTorch's own text."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.allocator.sizes import format_size


@dataclass(frozen=True, slots=True)
class OutOfMemoryDetails:
    """What PyTorch's text says: bytes asked for (rounded to a segment) and how the memory stood at that moment.

    `allowed` is the limit from the memory fraction, if any; `process` includes the CUDA context. `allocated` includes
    the `private` free bytes that only private pools may use. `rejected`: the driver was not asked, because of
    `throw_on_cudamalloc_oom`.
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
                f"per_process_memory_fraction limit. Requested size: {format_size(self.requested)}"
            )
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        private = (
            f"with {format_size(self.private)} allocated in private pools (e.g., CUDA Graphs), "
        )
        private = private if self.private else ""
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.requested)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.total)} "
            f"of which {format_size(self.free)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(self.process)} memory in use. "
            f"{allowed}Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, {private}"
            f"and {format_size(self.unallocated)} is reserved by PyTorch but unallocated."
        )


class OutOfMemoryError(RuntimeError):
    """`torch.OutOfMemoryError` of the simulator: no block fits and the driver gives no segment."""

    def __init__(self, details: OutOfMemoryDetails) -> None:
        super().__init__(details)
        self.details = details
