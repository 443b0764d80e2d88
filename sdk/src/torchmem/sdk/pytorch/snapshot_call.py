"""PyTorch's `_cuda_memorySnapshot`, with every reference that it takes given back.

Since 2.11 its argument is a tuple of a pool's two numbers and whether to include traces. PyTorch
takes one reference from each member at every call and never returns it (pytorch/pytorch, pull
request 196366; seen in 2.13). A number that only we refer to would be freed while it is in use,
which ends the process with signal 11. Python's `False`, before 3.12 made it immortal, would be
freed after about 20,000 snapshots. What is taken is measured, because it depends on both versions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[..., Mapping[str, Any]]

# The number of a pool that does not exist, so that its snapshot has no segments.
NO_POOL = 1 << 60
# Another thread may use `False` during a measurement, so that one reference seems to be left.
MEASUREMENTS = 3
# References to each number that cover what PyTorch has taken until it is given back.
SPARE_REFERENCES = 16


class SnapshotCall:
    """Calls `_cuda_memorySnapshot` for one pool, by default for all of them.

    Not for a PyTorch before 2.11, whose argument is None or one pool.
    """

    def __init__(self, call: Call, pool: int = 0, *, traces: bool) -> None:
        self._call = call
        self._numbers = _Numbers(pool)
        self._flag = traces
        self._taken_from_flag: int | None = None

    def __call__(self) -> Mapping[str, Any]:
        """Return the snapshot."""
        if self._taken_from_flag is None:
            self._taken_from_flag = references_taken_from_flag(self._call)
        add_references(self._flag, self._taken_from_flag)
        return self._numbers.use(self._call, self._flag)


class _Number(int):
    """An int that no other code refers to, unlike 0, so that its reference count is exact."""

    __slots__ = ()


class _Numbers:
    """Both numbers of a pool. Their reference counts are restored before and after each call."""

    def __init__(self, pool: int) -> None:
        self._pair = _Number(pool), _Number(pool)
        for number in self._pair:
            add_references(number, SPARE_REFERENCES)
        self._counts = self._count()

    def use(self, call: Call, flag: bool) -> Mapping[str, Any]:
        self._restore()  # an exception of a signal handler may have prevented it
        try:
            return call((*self._pair, flag))
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, before, now in zip(self._pair, self._counts, self._count(), strict=True):
            add_references(number, before - now)

    def _count(self) -> list[int]:
        return [sys.getrefcount(number) for number in self._pair]


def references_taken_from_flag(call: Call) -> int:
    """Return how many references one call takes from `False`, and give them back.

    `True` loses as many, but its snapshot may be large.
    """
    numbers = _Numbers(NO_POOL)
    taken = 0
    for _ in range(MEASUREMENTS):
        before = sys.getrefcount(False)
        numbers.use(call, False)
        lost = before - sys.getrefcount(False)
        add_references(False, lost)
        taken = max(taken, lost)
    return taken


def add_references(member: object, count: int) -> None:
    """Add references to an object; one too many does no harm."""
    for _ in range(count):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(member))
