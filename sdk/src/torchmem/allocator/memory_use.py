"""What the memory of a device is used for, as parts that add up to its total."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.sample.sample import DeviceSample

COMPONENT_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "held": "other tensors kept between steps",
    "step": "allocated within this step",
    "gradients_or_step": "gradients, or of this step",
    "rounding": "rounding of tensors",
}
"""The components in words, in the order in which they are shown; names of a script come first."""


MAX_SKEW_BYTES = 32 << 20
"""How far two sums of the same memory may differ because one was read shortly after the other."""


def device_parts(
    device: DeviceSample, driver_free: int | None, private_free: int = 0
) -> list[tuple[str, int]]:
    """Return the use of the device's memory in bytes, without parts of 0 bytes.

    `driver_free` and the statistics in `device` are of one moment; `private_free` are the free
    bytes in the pools of CUDA graphs and MemPools. The list is empty if the use is unknown.
    """
    outside = outside_bytes(device, driver_free)
    if driver_free is None or outside is None:
        return []
    parts = [
        *_reserved_parts(device, private_free),
        ("outside PyTorch's allocator", outside),
        ("free at the driver", driver_free),
    ]
    return [(name, size) for name, size in parts if size > 0]


def outside_bytes(device: DeviceSample, driver_free: int | None) -> int | None:
    """Return the bytes that were neither free at the driver nor reserved by this process.

    None if some reserved bytes were not on the device.
    """
    allocator, total = device.allocator, device.total_bytes
    if allocator is None or total is None or driver_free is None:
        return None
    outside = total - driver_free - allocator.reserved_bytes.total
    return None if -outside > MAX_SKEW_BYTES else max(0, outside)


def unbacked_bytes(device: DeviceSample, driver_free: int | None) -> int | None:
    """Return how many reserved bytes were not on the device at least; None if that is unknown.

    They and the driver's free bytes were more than the device has. An allocator outside PyTorch
    gives memory back behind the reserved addresses, as vLLM's does in sleep mode.
    """
    allocator, total = device.allocator, device.total_bytes
    if allocator is None or total is None or driver_free is None:
        return None
    excess = allocator.reserved_bytes.total + driver_free - total
    return excess if excess > MAX_SKEW_BYTES else None


def outside_at_start(device: DeviceSample) -> int | None:
    """Return the bytes that were not this process's own reserved ones at the first read."""
    first, total = device.first_read, device.total_bytes
    if first is None or total is None:
        return None
    return max(0, total - first.driver_free_bytes - first.reserved_bytes)


def _reserved_parts(device: DeviceSample, private_free: int) -> Iterator[tuple[str, int]]:
    allocator = device.allocator
    if allocator is None:
        return
    allocated, active = allocator.allocated_bytes.total, allocator.active_bytes.total
    yield from _tensors(device, allocated)
    yield "freed, waiting for a stream", active - allocated
    yield "free blocks of PyTorch", allocator.reserved_bytes.total - active - private_free
    yield "free in graph and MemPool pools", private_free


def _tensors(device: DeviceSample, allocated: int) -> Iterator[tuple[str, int]]:
    """Yield the components if they are those of these allocated bytes."""
    components = device.components
    if sum(components.values()) != allocated:
        yield "tensors", allocated
        return
    order = list(COMPONENT_NAMES)
    for name in sorted(components, key=lambda name: order.index(name) if name in order else -1):
        yield COMPONENT_NAMES.get(name, name), components[name]
