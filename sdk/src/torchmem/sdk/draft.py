"""What the parts add to a sample, which is created once at the end: a copy per part costs more.

A device to which the same is added as before is the same object as before, so that it is neither
checked nor compared again. A part therefore never changes a mapping that it has added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torchmem.sample.sample import DeviceSample


class DeviceDraft:
    """One device of a draft."""

    __slots__ = ("_counters", "_device", "_fields", "index")

    def __init__(self, device: DeviceSample) -> None:
        self.index = device.index
        self._device = device
        self._fields: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}

    def add(self, **fields: Any) -> None:
        """Set fields of `DeviceSample`, other than `counters`."""
        self._fields.update(fields)

    def count(self, **counters: Any) -> None:
        """Set fields of `Counters`."""
        self._counters.update(counters)

    def finished(self, earlier: Finished) -> DeviceSample:
        """Return the device with all that was added, or what `earlier` has of it; it gets it."""
        basis = self._device, self._fields, self._counters
        known = earlier.get(self.index)
        if known is not None and known[0][0] is self._device and known[0] == basis:
            return known[1]
        finished = self._finished()
        earlier[self.index] = basis, finished
        return finished

    def _finished(self) -> DeviceSample:
        if self._counters:
            counters = replace(self._device.counters, **self._counters)
            return replace(self._device, counters=counters, **self._fields)
        return replace(self._device, **self._fields) if self._fields else self._device


class Draft:
    """The devices of a sample, and what the parts add to them and to the sample."""

    __slots__ = ("_fields", "devices")

    def __init__(self, devices: Iterable[DeviceSample]) -> None:
        self.devices = tuple(map(DeviceDraft, devices))
        self._fields: dict[str, Any] = {}

    def add(self, **fields: Any) -> None:
        """Set fields of `Sample`, other than `devices`."""
        self._fields.update(fields)

    def finished(self, earlier: Finished | None = None) -> dict[str, Any]:
        """Return fields of `Sample`: the devices, and all that was added.

        `earlier` has the devices of the previous draft, and then those of this one.
        """
        earlier = {} if earlier is None else earlier
        devices = tuple([device.finished(earlier) for device in self.devices])
        return {**self._fields, "devices": devices}


Finished = dict[int, tuple[tuple[DeviceSample, dict[str, Any], dict[str, Any]], DeviceSample]]
"""By device: what it was made of, and the device as it was published."""
