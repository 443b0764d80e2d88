"""The tensors that are Python objects, in groups of the same shape, type, and role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MAX_GROUPS = 10
MAX_DIMENSIONS = 16

Role = Literal["parameter", "output"]
"""A `torch.nn.Parameter`, or the output of an operation that autograd recorded (no leaf)."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one shape, type, and role, such as 216 of [8, 128, 8000] float32.

    Attributes: count: the number of storages, each counted by its largest tensor. shape, dtype:
        None for all other tensors together. bytes: the bytes of the storages. role: None for
        tensors that are neither, and for all other tensors together.
    """

    count: int
    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: int
    role: Role | None = None


Kind = tuple[tuple[int, ...], str, Role | None]


def grouped(tensors: Iterable[tuple[Kind, int]]) -> tuple[TensorGroup, ...]:
    """Return the groups with the most bytes, and the rest as one; `tensors` are kinds and sizes."""
    sums: dict[Kind, list[int]] = {}
    for kind, size in tensors:
        entry = sums.setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += size
    groups = [
        TensorGroup(count, shape, dtype, size, role)
        for (shape, dtype, role), (count, size) in sums.items()
    ]
    groups.sort(key=lambda group: (-group.bytes, group.shape or ()))
    rest = groups[MAX_GROUPS:]
    if not rest:
        return tuple(groups)
    count, size = sum(group.count for group in rest), sum(group.bytes for group in rest)
    return (*groups[:MAX_GROUPS], TensorGroup(count, None, None, size))
