"""What the traceback of the last error keeps: only that, and without touching its frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from torchmem.sdk.oom.last_error import kept_by_last_error


class Tensor:
    """Counts as a tensor of one byte."""


def storage_of(value: object) -> tuple[int, int] | None:
    """Return the storage of a Tensor."""
    return (id(value), 1) if type(value) is Tensor else None


SHARED = Tensor()


def _outer(argument: object) -> None:
    _inner(argument)


def _inner(argument: object) -> None:
    own, several, named = Tensor(), [Tensor(), Tensor()], {"a": Tensor()}  # noqa: F841
    shared, holder = SHARED, (SHARED,)  # noqa: F841
    raise ValueError("no")


@pytest.fixture(autouse=True)
def _without_traceback() -> Iterator[None]:
    yield
    if hasattr(sys, "last_traceback"):
        del sys.last_traceback


def test_tensors_that_only_its_functions_keep() -> None:
    """Local variables count, arguments once, also in containers; what others keep does not."""
    assert kept_by_last_error(storage_of) == 0
    try:
        _outer(Tensor())
    except ValueError as error:
        sys.last_traceback = error.__traceback__

    assert kept_by_last_error(storage_of) == 5
    assert kept_by_last_error(storage_of) == 5


@pytest.mark.parametrize("odd", [None, 7, "traceback"])
def test_something_else_in_its_place(odd: object) -> None:
    """A script may have put anything there."""
    sys.last_traceback = odd  # type: ignore[assignment]

    assert kept_by_last_error(storage_of) == 0
