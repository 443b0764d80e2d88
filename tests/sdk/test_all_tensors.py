"""What the tensors of a process are: each storage once, without running code of the script."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from torchmem.allocator.tensor_groups import MAX_GROUPS, Kind, TensorGroup, grouped
from torchmem.sdk.pytorch.all_tensors import TensorWalk


class Storage:
    """A storage of so many bytes."""

    def __init__(self, size: int) -> None:
        self._cdata = id(self)
        self._size = size

    def nbytes(self) -> int:
        """Return its bytes."""
        return self._size


class Tensor:
    """What is read of a tensor of float32."""

    is_cuda = True
    is_leaf = True
    dtype = "torch.float32"

    def __init__(self, *shape: int, storage: Storage | None = None, device: int = 0) -> None:
        self.shape = shape
        self.device = device
        self.nbytes = 4
        for size in shape:
            self.nbytes *= size
        self.storage = storage or Storage(self.nbytes)

    def get_device(self) -> int:
        """Return the index of its device."""
        return self.device

    def untyped_storage(self) -> Storage:
        """Return its storage."""
        return self.storage


class Parameter(Tensor):
    """A parameter."""


class Sparse(Tensor):
    """A type of the script's, which must not be touched."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)


class Strange(type):
    """A metaclass whose classes are equal to everything, or fail."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError

    def __hash__(cls) -> int:
        raise AssertionError


TORCH = SimpleNamespace(
    Tensor=Tensor,
    nn=SimpleNamespace(Parameter=Parameter),
    _C=SimpleNamespace(DisableTorchFunction=nullcontext),
)


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    gc.collect()


def timeless_walk() -> TensorWalk:
    """Return a walk that takes no time: a test process may have a million objects."""
    return TensorWalk(TORCH, clock=lambda: 0.0)


def groups(device: int = 0) -> list[tuple[int, tuple[int, ...] | None, int]]:
    """Return count, shape and bytes of what is found."""
    found = timeless_walk().groups(device)
    assert found is not None
    return [(group.count, group.shape, group.bytes) for group in found]


def test_tensors_by_shape() -> None:
    """Tensors and parameters of one shape are one group, the largest first."""
    kept = [Tensor(8, 128), Tensor(8, 128), Parameter(1024, 1024), Tensor(4, device=1)]
    kept.append(Tensor(0))

    assert groups() == [(1, (1024, 1024), 4 << 20), (2, (8, 128), 8192)]
    assert groups(device=1) == [(1, (4,), 16)]
    assert len(kept) == 5


def test_a_storage_counts_once() -> None:
    """Of the tensors that share one, the largest stands for all of its bytes."""
    whole = Tensor(100, 10)
    views = [Tensor(10, storage=whole.storage), Tensor(1, 10, storage=whole.storage)]
    part = Tensor(3, storage=Storage(1 << 20))

    assert groups() == [(1, (3,), 1 << 20), (1, (100, 10), 4000)]
    assert [len(views), part.nbytes] == [2, 12]


def test_the_roles_of_tensors() -> None:
    """Outputs with graphs are told from data; views of a parameter are the parameter."""
    output, data = Tensor(8), Tensor(8)
    output.is_leaf = False
    parameter = Parameter(9)
    view = Tensor(9, storage=parameter.storage)
    found = timeless_walk().groups(0)

    assert found is not None
    assert {(group.shape, group.role, group.count) for group in found} == {
        ((9,), "parameter", 1),
        ((8,), "output", 1),
        ((8,), None, 1),
    }
    assert data.is_leaf
    assert view.is_leaf


def test_other_types_are_not_touched() -> None:
    """Subclasses, strange classes, and tensors that fail cost nothing but their own bytes."""
    kept: list[object] = [Sparse.__new__(Sparse), Strange("Odd", (), {})()]
    broken, kept_too = Tensor(5), Tensor(7)
    del broken.storage

    assert groups() == [(1, (7,), 28)]
    assert [kept, broken, kept_too]


def test_no_tensor_is_kept() -> None:
    """After the walk the tensors are free to go."""
    tensor = Tensor(4)
    walk = timeless_walk()
    walk.groups(0)
    del tensor

    assert groups() == []


def test_the_time_is_bounded() -> None:
    """A walk that takes too long has no result; it does not tell a part as if it were all."""
    now = iter(range(1_000_000))
    assert TensorWalk(TORCH, clock=lambda: float(next(now))).groups(0) is None


def test_many_groups() -> None:
    """Beyond the largest ones, the others are one group, and the bytes add up."""
    kinds: list[tuple[Kind, int]] = [
        (((size,), "int8", None), size) for size in range(1, 31) for _ in range(2)
    ]
    found = grouped(kinds)

    assert len(found) == MAX_GROUPS + 1
    assert TensorGroup(2, (30,), "int8", 60) == found[0]
    assert (found[-1].count, found[-1].shape, found[-1].dtype) == (40, None, None)
    assert sum(size for _, size in kinds) == sum(group.bytes for group in found)
