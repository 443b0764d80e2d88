"""Memory of a device outside this process's allocator, and reserved memory that is not on it.

Of a device that shares the host's memory, neither is known: the rest is what the host uses.
"""

from __future__ import annotations

from torchmem.allocator.later_layout import MAX_SKEW_BYTES
from torchmem.sample.sample import ASLEEP, DeviceSample

LIMITED_SHARE = 0.95
"""What CUDA reports of a card is nearly all of it, without what the driver keeps for itself."""


def is_limited(device: DeviceSample, card_bytes: int | None) -> bool:
    """Return whether software lets the process use only a part of its card, as HAMi does.

    Then its `driver_free_bytes` are what its limit leaves. `card_bytes`: what NVML reports of the
    card, without what the driver keeps for itself; None if unknown.
    """
    total = device.total_bytes
    return total is not None and card_bytes is not None and total < LIMITED_SHARE * card_bytes


def own_bytes(device: DeviceSample) -> int | None:
    """Return the bytes of a device that has memory of its own; None if it shares the host's."""
    return None if device.shares_host_memory else device.total_bytes


def outside_bytes(
    device: DeviceSample, driver_free: int | None, asleep: int | None = None
) -> int | None:
    """Return the bytes that were neither free at the driver nor reserved by this process.

    What an engine of this process has given back counts as not reserved: `asleep`, or by default
    the component. None if other reserved bytes were not on the device either.
    """
    allocator, total = device.allocator, own_bytes(device)
    if allocator is None or total is None or driver_free is None:
        return None
    given_back = device.components.get(ASLEEP, 0) if asleep is None else asleep
    outside = total - driver_free - (allocator.reserved_bytes.total - given_back)
    return None if -outside > MAX_SKEW_BYTES else max(0, outside)


def unbacked_bytes(device: DeviceSample, driver_free: int | None) -> int | None:
    """Return how many reserved bytes were not on the device at least; None if that is unknown.

    They and the driver's free bytes were more than the device has. An allocator outside PyTorch
    gives memory back behind the reserved addresses, as vLLM's does in sleep mode.
    """
    allocator, total = device.allocator, own_bytes(device)
    if allocator is None or total is None or driver_free is None:
        return None
    excess = allocator.reserved_bytes.total + driver_free - total
    return excess if excess > MAX_SKEW_BYTES else None


def outside_at_start(device: DeviceSample) -> int | None:
    """Return the bytes outside this process's reserved memory at the first read."""
    first, total = device.first_read, own_bytes(device)
    if first is None or total is None:
        return None
    return max(0, total - first.driver_free_bytes - first.reserved_bytes)
