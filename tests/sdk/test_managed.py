"""Managed memory, which only the library that allocated it can tell."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from torchmem.sample.sample import DeviceSample
from torchmem.sdk.draft import Draft
from torchmem.sdk.reading.managed import ManagedMemory, managed_bytes

DEVICES = [DeviceSample(index, None, None, 80 << 30) for index in (0, 1)]


@dataclass
class Paged:
    """A tensor of bitsandbytes' `get_paged`."""

    size: int
    page_deviceid: int | None = 0

    def numel(self) -> int:
        """Return the number of elements."""
        return self.size

    def element_size(self) -> int:
        """Return the bytes of an element, which is a float."""
        return 4


def modules(*tensors: Paged) -> dict[str, Any]:
    """Return the modules of a script with a paged optimizer."""
    manager = SimpleNamespace(_instance=SimpleNamespace(paged_tensors=list(tensors)))
    return {"bitsandbytes.functional": SimpleNamespace(GlobalPageManager=manager)}


def test_paged_tensors_are_counted_by_device() -> None:
    """A device of None is the first one, as in bitsandbytes."""
    found = managed_bytes(modules(Paged(100), Paged(10, None), Paged(1, 1)))
    assert found == {0: 440, 1: 4}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bitsandbytes.functional": SimpleNamespace()},
        {"bitsandbytes.functional": SimpleNamespace(GlobalPageManager=SimpleNamespace())},
    ],
)
def test_without_the_library_or_its_manager_nothing_is_known(given: dict[str, Any]) -> None:
    """Its singleton is not created for that."""
    assert managed_bytes(given) == {}


def test_a_device_without_managed_memory_has_no_value() -> None:
    """Absent, not 0."""
    part = ManagedMemory(modules(Paged(100)))
    part.after_read(1)
    draft = Draft(DEVICES)
    part.complete(draft)
    assert [device.managed_bytes for device in draft.finished()["devices"]] == [400, None]
