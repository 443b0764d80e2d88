"""Headroom of a process that has not read its statistics since other processes took memory.

A server that waits for requests runs no bytecode, so its SDK may read nothing for hours. What other
processes have taken since its last read is known from NVML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchmem.allocator.later_layout import MAX_SKEW_BYTES
from torchmem.allocator.outside_memory import is_limited
from torchmem.exporter.subjects.outside_allocator import ProcessUse, live_devices
from torchmem.host.process_table import process_key
from torchmem.node.published import DeviceProcess, Published
from torchmem.sample.sample import DeviceSample, Layout

Uses = Mapping[tuple[str, int], ProcessUse]
"""What NVML reports of each process, by the device's UUID and the pid."""


def bounded(
    published: Sequence[Published], uses: Uses, outside: Mapping[DeviceProcess, int]
) -> list[Published]:
    """Return the processes with the headroom that other processes have left them.

    `outside`: bytes outside the allocator by process, of the same scrape. Where either is unknown,
    the headroom stays as it is.
    """
    changed: dict[int, dict[int, DeviceSample]] = {}
    for item, device, use in live_devices(published, uses):
        known = outside.get((device.uuid or "", process_key(item.sample.process)))
        taken = None if use is None else taken_by_others(device, use, known)
        if taken is not None and taken > MAX_SKEW_BYTES and device.layout is not None:
            layout = _without(device.layout, taken)
            changed.setdefault(id(item), {})[device.index] = replace(device, layout=layout)
    return [_with_devices(item, changed.get(id(item), {})) for item in published]


def taken_by_others(device: DeviceSample, use: ProcessUse, outside: int | None) -> int | None:
    """Return what other processes have taken since the statistics of this one were read.

    Its own allocations do not change the sum of what it holds and what is free. If software limits
    the process, others take from it where the card has less than its limit leaves.
    """
    then, now = device.driver_free_bytes, use.available_bytes
    if then is None or now is None or device.allocator is None:
        return None
    if is_limited(device, use.card_bytes):
        return then - now + use.used_bytes
    if outside is None:
        return None
    return then + device.allocator.reserved_bytes.total + outside - now


def _without(layout: Layout, taken: int) -> Layout:
    """Return the layout with less headroom, but not less than its largest free block serves."""
    return replace(
        layout,
        headroom_bytes=_less(layout.headroom_bytes, taken, layout),
        headroom_flush_bytes=_less(layout.headroom_flush_bytes, taken, layout),
    )


def _less(headroom: int | None, taken: int, layout: Layout) -> int | None:
    if headroom is None:
        return None
    return max(headroom - taken, min(headroom, layout.largest_free_block_bytes or 0), 0)


def _with_devices(item: Published, changed: Mapping[int, DeviceSample]) -> Published:
    if not changed:
        return item
    devices = tuple(changed.get(device.index, device) for device in item.sample.devices)
    return replace(item, sample=replace(item.sample, devices=devices))
