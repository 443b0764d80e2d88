"""GPU memory that other libraries than PyTorch's allocator count: NCCL (or RCCL), and RMM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_GROUPS = 16
OTHER_GROUPS = "others"
"""All groups but the largest, if a process has more than MAX_GROUPS."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """Memory of a process group's communicators on one device, in bytes.

    Groups with one description count as one.

    Attributes:
        persistent_bytes: what stays on the device until the group is destroyed.
        suspendable_bytes: what would be given back to the driver if they were suspended.
        suspended_bytes: what was given back, and is taken again when they resume.
        is_counted: whether NCCL itself counts the bytes, since 2.29.7. Otherwise `persistent_bytes`
            is by how much the memory outside PyTorch's allocator grew from the read before the
            communicators were created to the read after that, whatever took it.
        idle_since: the Unix time since which the group has begun no collective, sends and receives
            left aside; None if that is unknown.
    """

    persistent_bytes: int
    suspendable_bytes: int = 0
    suspended_bytes: int = 0
    is_counted: bool = True
    idle_since: float | None = None

    @property
    def held_bytes(self) -> int:
        """What is on the device."""
        return self.persistent_bytes + self.suspendable_bytes

    def by_state(self) -> dict[str, int]:
        """Return the bytes by the label `state`; those that are suspended are not on the device."""
        sizes = {
            "persistent" if self.is_counted else "estimated": self.persistent_bytes,
            "suspendable": self.suspendable_bytes,
            "suspended": self.suspended_bytes,
        }
        return {state: size for state, size in sizes.items() if size}


def held_bytes(communicators: Iterable[Communicator]) -> int:
    """Return what all of them have on the device."""
    return sum(each.held_bytes for each in communicators)


def joined(communicators: Iterable[Communicator]) -> Communicator:
    """Return several as one, which is idle since the latest of them is."""
    found = list(communicators)
    idle = [each.idle_since for each in found if each.idle_since is not None]
    return Communicator(
        sum(each.persistent_bytes for each in found),
        sum(each.suspendable_bytes for each in found),
        sum(each.suspended_bytes for each in found),
        all(each.is_counted for each in found),
        max(idle) if idle and len(idle) == len(found) else None,
    )


@dataclass(frozen=True, slots=True)
class RmmMemory:
    """Memory of RAPIDS' memory manager on one device, in bytes.

    Attributes:
        pool_bytes: what its pool has taken from the driver; None without a PoolMemoryResource.
        used_bytes: what is allocated from it; None without an adaptor that counts.
        peak_bytes: the most of that, as far as the adaptor remembers.
        serves_pytorch: whether it is PyTorch's allocator, which then has no statistics of its own.
    """

    pool_bytes: int | None = None
    used_bytes: int | None = None
    peak_bytes: int | None = None
    serves_pytorch: bool = False

    @property
    def held_bytes(self) -> int:
        """What is on the device at least: the pool, or without one what is allocated."""
        return self.used_bytes or 0 if self.pool_bytes is None else self.pool_bytes
