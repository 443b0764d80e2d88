"""Divide the memory of a device into parts by use; the parts add up to the total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchmem.allocator.outside_memory import outside_bytes
from torchmem.metrics.memory_parts import COMPONENTS, PARTS
from torchmem.sample.quick_dataclass import dataclass
from torchmem.sample.sample import ASLEEP, Allocator, DeviceSample

_ORDER = (
    "parameters",
    "gradients",
    "optimizer_state",
    "held",
    "step",
    "gradients_or_step",
    "rounding",
    "pending",
)
COMPONENT_NAMES = {name: COMPONENTS[name].words for name in _ORDER}
"""The components in words, in the order in which they are shown; names of a script come first."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A part of a device's memory: its name in the table of colors, in words, and its bytes.

    The parts that a script has named share the color `other`.
    """

    name: str
    label: str
    bytes: int


def device_uses(
    device: DeviceSample,
    driver_free: int | None,
    private_free: int = 0,
    unread_steps: int | None = None,
) -> list[MemoryUse]:
    """Return the use of the device's memory in bytes, without parts of 0 bytes.

    `driver_free` and the statistics in `device` were read at the same time; `private_free` are the
    free bytes in the pools of CUDA graphs and MemPools. `unread_steps` have ended since the read
    that the bytes of the step count from. The list is empty if the use is unknown.
    """
    outside = outside_bytes(device, driver_free)
    if driver_free is None or outside is None:
        return []
    parts = [
        *_reserved_parts(device, private_free, component_names(unread_steps)),
        _part("not_pytorch", outside),
        _part("free", driver_free),
    ]
    return [use for use in parts if use.bytes > 0]


def component_names(unread_steps: int | None) -> dict[str, str]:
    """Return the components in words.

    If `unread_steps` have ended since the latest read at a step's end, what was allocated since
    then is from more than this step; None if their number is unknown.
    """
    if not unread_steps:
        return COMPONENT_NAMES
    last = f"the last {unread_steps + 1:,} steps"
    names = {"step": f"allocated in {last}", "gradients_or_step": f"gradients, or of {last}"}
    return COMPONENT_NAMES | names


def _reserved_parts(
    device: DeviceSample, private_free: int, names: Mapping[str, str]
) -> Iterator[MemoryUse]:
    allocator = device.allocator
    if allocator is None:
        return
    active = allocator.active_bytes.total
    yield from _tensors(device, allocator, names)
    free = allocator.reserved_bytes.total - active - private_free
    yield _part("cached", free)
    yield _part("private_pools", private_free)


def _part(name: str, size: int) -> MemoryUse:
    return MemoryUse(name, PARTS[name].words, size)


def known_components(device: DeviceSample) -> dict[str, int]:
    """Return the components if they add up to the device's active bytes, else nothing.

    Pending bytes are one of them, which samples of older versions leave out.
    """
    allocator = device.allocator
    if allocator is None or not device.components:
        return {}
    active = allocator.active_bytes.total
    pending = active - allocator.allocated_bytes.total
    components = {"pending": pending, **device.components} if pending else device.components
    return components if sum(components.values()) == active else {}


def _tensors(
    device: DeviceSample, allocator: Allocator, names: Mapping[str, str]
) -> Iterator[MemoryUse]:
    """Yield the components of the active bytes."""
    components = dict(known_components(device))
    if not components:
        allocated = allocator.allocated_bytes.total
        yield _part("in_use", allocated)
        yield MemoryUse("pending", names["pending"], allocator.active_bytes.total - allocated)
    order = list(COMPONENT_NAMES)
    components.pop(ASLEEP, None)  # it is not on the device
    for name in sorted(components, key=lambda name: order.index(name) if name in order else -1):
        yield MemoryUse(name if name in order else "other", names.get(name, name), components[name])
