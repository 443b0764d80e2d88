"""What the parts add to a sample, which is created once at the end: a copy per part costs more."""

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

    def finished(self) -> DeviceSample:
        """Return the device with all that was added."""
        if self._counters:
            self._fields["counters"] = replace(self._device.counters, **self._counters)
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

    def finished(self) -> dict[str, Any]:
        """Return fields of `Sample`: the devices, and all that was added."""
        devices = tuple(device.finished() for device in self.devices)
        return {**self._fields, "devices": devices}
