"""The interface between the SDK and the process groups of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CommunicatorMemory:
    """What NCCL counts of the communicators of one process group, in bytes.

    persistent: never given back while the group exists.
    suspendable: given back while the communicators are suspended, if `is_suspended`.
    """

    persistent: int
    suspendable: int
    is_suspended: bool


class ProcessGroup(Protocol):
    """A process group of this process that NCCL or RCCL serves."""

    @property
    def name(self) -> str:
        """Its description, such as mesh_dp, else PyTorch's name, which is often a number."""

    @property
    def device(self) -> int | None:
        """The device of its communicators by torch's index; None if that is unknown."""

    @property
    def is_ready(self) -> bool:
        """Whether its communicators exist; PyTorch mostly creates them at the first collective."""

    def collectives(self) -> int | None:
        """Return how many collectives this process has begun in it; None if unknown."""

    def memory(self) -> CommunicatorMemory | None:
        """Return what NCCL counts; None if it does not. Only if it is ready.

        Neither communicates nor waits for the device. It must be called between two collectives, in
        the thread that makes them.
        """

    def suspend(self) -> None:
        """Wait for the device, and give back what can be; every process of the group must call it.

        Raises RuntimeError if that is unsupported, or fails.
        """

    def resume(self) -> None:
        """Take it again, likewise."""
