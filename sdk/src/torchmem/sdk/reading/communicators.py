"""What NCCL's communicators hold, by process group.

NCCL's own counts are read where that can neither wait nor communicate: at the end of a step, in the
thread that makes the collectives, from communicators that exist. Where NCCL does not count, the
growth of the memory outside the allocator is attributed to the communicators that have appeared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from torchmem.allocator.outside_memory import outside_at_start, outside_bytes
from torchmem.allocator.process_groups import CommunicatorMemory, ProcessGroup
from torchmem.sample.libraries import (
    MAX_GROUPS,
    OTHER_GROUPS,
    Communicator,
    held_bytes,
    joined,
)
from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import COMMUNICATOR_READ_SECONDS
from torchmem.sdk.safety.errors import Stage

Groups = dict[str, Communicator]
"""The communicators on one device by the name of their group."""


class CommunicatorReader(Part):
    """Reads every COMMUNICATOR_READ_SECONDS, and when communicators have appeared or gone."""

    stage: Stage = "stats"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._backend = recorder.backend
        self._known: Mapping[int, Groups] = {}
        self._names: set[str] = set()
        self._idle_times = IdleTimes()
        self._growth: dict[int, GrowthOutside] = {}
        self._next = float("-inf")

    def after_read(self, step: int | None) -> None:
        """Read at the end of a step, if that is due."""
        if step is None:
            return
        groups = [group for group in self._backend.process_groups() if group.is_ready]
        names, now = {group.name for group in groups}, time.monotonic()
        if now >= self._next or names != self._names:
            self._next, self._names = now + COMMUNICATOR_READ_SECONDS, names
            self._read(groups)
        for index, record in self._recorder.records().items():
            self._growth_on(index, record).note(outside(record))

    def read_now(self) -> None:
        """Read between two collectives, in the thread that makes them."""
        self._read([group for group in self._backend.process_groups() if group.is_ready])

    def _read(self, groups: Iterable[ProcessGroup]) -> None:
        counted: dict[int, dict[str, list[Communicator]]] = {}
        others: dict[int, set[str]] = {}
        for group in groups:
            if group.device is None:
                continue
            memory = group.memory()
            if memory is None:
                others.setdefault(group.device, set()).add(group.name)
            else:
                found = _counted(memory, self._idle_times.idle_since(group))
                counted.setdefault(group.device, {}).setdefault(group.name, []).append(found)
        self._known = {
            index: {
                **{name: joined(found) for name, found in counted.get(index, {}).items()},
                **self._growth_on(index, record).attributed(
                    others.get(index, set()), outside(record)
                ),
            }
            for index, record in self._recorder.records().items()
        }
        for index, record in self._recorder.records().items():
            by_nccl = (each for each in self._known.get(index, {}).values() if each.is_counted)
            record.communicators = held_bytes(by_nccl)

    def _growth_on(self, index: int, record: DeviceRecord) -> GrowthOutside:
        if index not in self._growth:
            self._growth[index] = GrowthOutside(outside_at_start(record.bare_sample()))
        return self._growth[index]

    def complete(self, sample: Draft) -> None:
        """Add the communicators of each device."""
        for device in sample.devices:
            known = self._known.get(device.index)
            if known:
                device.add(communicators=largest(known))


class GrowthOutside:
    """Attributes the growth of the memory outside the allocator to what appeared meanwhile.

    `before` is what was outside at the latest read, in bytes; None if unknown.
    """

    def __init__(self, before: int | None) -> None:
        self._before = before
        self._grown: dict[tuple[str, ...], int] = {}

    def note(self, now: int | None) -> None:
        """Take what is outside at a step's end."""
        self._before = now

    def attributed(self, names: set[str], now: int | None) -> Groups:
        """Return the growth of these groups; those that appeared at one read share one entry."""
        kept = {those: size for those, size in self._grown.items() if names.intersection(those)}
        known = {name for those in self._grown for name in those}
        appeared = tuple(sorted(names - known))
        if appeared:
            grown = 0 if now is None or self._before is None else max(0, now - self._before)
            kept[appeared] = grown
        self._grown = kept
        return {
            ", ".join(those): Communicator(size, is_counted=False)
            for those, size in kept.items()
            if size
        }


class IdleTimes:
    """Since when groups have begun no collective, by their count at each read."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, float]] = {}

    def idle_since(self, group: ProcessGroup) -> float | None:
        """Return the Unix time of the first read with the present count; None if unknown."""
        count = group.collectives()
        if not count:
            return None
        before, since = self._counts.get(group.name, (0, 0.0))
        if count != before:
            since = time.time()
            self._counts[group.name] = count, since
        return since


def outside(record: DeviceRecord) -> int | None:
    """Return the bytes outside the allocator at the latest read of a device."""
    return outside_bytes(record.bare_sample(), record.driver_free)


def largest(groups: Groups) -> Groups:
    """Return at most MAX_GROUPS entries: the largest, and the others as one."""
    if len(groups) <= MAX_GROUPS:
        return groups
    names = sorted(groups, key=lambda name: -groups[name].held_bytes)
    first, rest = names[: MAX_GROUPS - 1], names[MAX_GROUPS - 1 :]
    kept = {name: groups[name] for name in first if name != OTHER_GROUPS}
    return {**kept, OTHER_GROUPS: joined(groups[name] for name in rest)}


def _counted(memory: CommunicatorMemory, idle_since: float | None) -> Communicator:
    on_device, away = memory.suspendable, 0
    if memory.is_suspended:
        on_device, away = away, on_device
    return Communicator(memory.persistent, on_device, away, idle_since=idle_since)
