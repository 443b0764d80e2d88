"""Tensors that are only numbers, and what counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torchmem.allocator.backend import Storages, WeakStorage
from torchmem.sample.sample import Allocator, ByPool

addresses = count(1 << 40, 1 << 30)


@dataclass(eq=False)
class FakeTensor:
    """A tensor on device 0; a parameter may have a gradient."""

    size: int
    grad: FakeTensor | None = None
    address: int = field(default_factory=lambda: next(addresses))


@dataclass(eq=False)
class FakeOptimizer:
    """The attributes of an optimizer that are read."""

    param_groups: list[dict[str, list[FakeTensor]]]
    state: dict[Any, Any] = field(default_factory=dict)


class FakeCounter:
    """Counts fake tensors, at a cost of one microsecond each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counted = 0

    def clock(self) -> float:
        """Return the time, which only counting and `wait` let pass."""
        return self.now

    def count(self, values: Iterable[object], found: Storages) -> None:
        """Add the tensors in lists and dicts."""
        for tensor in self.tensors(list(values)):
            self.counted += 1
            self.now += 1e-6
            found.setdefault(0, {})[tensor.address] = tensor.size

    def tensors(self, value: object) -> list[Any]:
        """Return the tensors in lists and dicts."""
        if isinstance(value, FakeTensor):
            return [value]
        members: Iterable[object] = ()
        if isinstance(value, dict):
            members = value.values()
        elif isinstance(value, list):
            members = value
        return [tensor for member in members for tensor in self.tensors(member)]

    def count_gradients(self, parameters: Iterable[Any], found: Storages) -> None:
        """Add the gradients."""
        self.count([parameter.grad for parameter in parameters], found)

    def have_gradients(self, parameters: Sequence[Any]) -> tuple[bool, ...]:
        """Return which have one."""
        return tuple(parameter.grad is not None for parameter in parameters)

    def viewed_storages(self, parameters: Iterable[Any]) -> list[WeakStorage]:
        """Return nothing: no gradient is a view."""
        return []


def allocator(requested: int, rounding: int = 0, pending: tuple[int, int] = (0, 0)) -> Allocator:
    """Statistics with these bytes of tensors.

    `pending`: the bytes that were requested of blocks that wait for a stream, and of the blocks.
    """
    allocated = ByPool(0, requested + rounding)
    active, pool = ByPool(0, allocated.total + pending[1]), ByPool(0, requested + pending[0])
    return Allocator(allocated, active, active, pool, None, 0, 0, 0)
