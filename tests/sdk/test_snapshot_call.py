"""PyTorch takes references from the arguments of its snapshot call, and all come back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest
from support.garbage import no_collection

from torchmem.sdk.pytorch.snapshot_call import NO_POOL, SnapshotCall

CALLS = 5_000


class FakeSnapshot:
    """Takes references from the members of its argument, as `_cuda_memorySnapshot` does.

    `numbers` and `flag` are how many it takes from a pool's numbers and from the flag. It keeps the
    counts of the numbers at the start of each call.
    """

    def __init__(self, numbers: int, flag: int) -> None:
        self.taken = (numbers, numbers, flag)
        self.arguments: list[str] = []  # as text, which keeps no reference to False
        self.lowest = sys.maxsize

    def __call__(self, argument: tuple[int, int, bool]) -> Mapping[str, Any]:
        self.lowest = min(self.lowest, *map(sys.getrefcount, argument))
        self.arguments.append(repr(argument))
        for member, taken in zip(argument, self.taken, strict=True):
            for _ in range(taken):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(member))
        # A snapshot's own references to False, which it returns when it is dropped.
        return {"segments": [{"is_expandable": False}] * 10}


@pytest.mark.parametrize(("numbers", "flag"), [(1, 1), (0, 0), (1, 0), (0, 1), (3, 2)])
@pytest.mark.parametrize("traces", [False, True])
def test_what_is_taken_comes_back(numbers: int, flag: int, traces: bool) -> None:
    """After thousands of calls, the counts of False and True are those from before.

    So are those of the numbers, whatever a version of PyTorch takes.
    """
    fake = FakeSnapshot(numbers, flag)
    call = SnapshotCall(fake, NO_POOL, traces=traces)
    call()
    gc.collect()  # garbage of other tests refers to False and True
    first, before = fake.lowest, (sys.getrefcount(False), sys.getrefcount(True))

    with no_collection():
        for _ in range(CALLS):
            call()
        now = sys.getrefcount(False), sys.getrefcount(True)

    assert pytest.approx([b - n for b, n in zip(before, now, strict=True)], abs=50) == [0, 0]
    assert first == fake.lowest > 1


def test_the_pool_and_the_flag_arrive() -> None:
    """The call is for the given pool; what is taken is measured on a pool that does not exist."""
    fake = FakeSnapshot(1, 1)

    snapshot = SnapshotCall(fake, 7, traces=True)()

    assert len(snapshot["segments"]) == 10
    assert fake.arguments.pop() == "(7, 7, True)"
    assert set(fake.arguments) == {f"({NO_POOL}, {NO_POOL}, False)"}


def test_an_interrupted_call_loses_nothing() -> None:
    """Wherever an exception of a signal handler interrupts a call, the next one makes up for it."""
    fake = FakeSnapshot(1, 1)
    call = SnapshotCall(fake, traces=False)
    call()
    lowest, interrupted = fake.lowest, 0

    for place in range(100):
        with suppress(KeyboardInterrupt), interruption_at(place):
            call()
            continue
        interrupted += 1
    call()

    assert interrupted > 5
    assert lowest - 1 <= fake.lowest


@contextmanager
def interruption_at(place: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at this call or return, counted from 0."""
    places = count()

    def profile(*_: object) -> None:
        if next(places) == place:
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
