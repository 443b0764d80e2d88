"""The simulated OutOfMemoryError, with the numbers of PyTorch's own text."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.core.sizes import format_size


@dataclass(frozen=True, slots=True)
class OomReport:
    """What PyTorch's text says: bytes asked for (rounded to a segment) and how the memory stood at that moment.

    `allowed` is the limit from the memory fraction, if any; `process` includes the CUDA context.
    """

    device: int
    requested: int
    total: int
    free: int
    process: int
    allowed: int | None
    allocated: int
    unallocated: int

    def __str__(self) -> str:
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.requested)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.total)} "
            f"of which {format_size(self.free)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(self.process)} memory in use. "
            f"{allowed}Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, "
            f"and {format_size(self.unallocated)} is reserved by PyTorch but unallocated."
        )


class OutOfMemoryError(RuntimeError):
    """`torch.OutOfMemoryError` of the simulator: no block fits and the driver gives no segment."""

    def __init__(self, report: OomReport) -> None:
        super().__init__(report)
        self.report = report
