"""Values of an unpickled snapshot, each of which must have exactly the type that PyTorch writes."""

from __future__ import annotations

from typing import Any

from torchmem.allocator.snapshot import PoolId

HOW_TO_RECORD = (
    "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before training and "
    "torch.cuda.memory._dump_snapshot(FILE) after some steps, or run `torchmem capture --rank N`"
)
LIMIT = 1 << 63


class InvalidSnapshotError(Exception):
    """A snapshot that cannot be used; the text completes a sentence that starts with its name."""


def damaged(problem: str) -> InvalidSnapshotError:
    """Return the error for content that no supported version of PyTorch writes."""
    return InvalidSnapshotError(
        f"is not a snapshot as PyTorch 2.0 and newer write it ({problem}): record another one and "
        "do not modify the file of torch.cuda.memory._dump_snapshot."
    )


def checked_dict(value: object, where: str) -> dict[Any, Any]:
    """Return a dict. Raise InvalidSnapshotError for another type, as do the functions below."""
    if type(value) is not dict:
        raise damaged(f"{where} is not a dict")
    return value


def checked_list(value: object, where: str) -> list[Any]:
    """Return a list."""
    if type(value) is not list:
        raise damaged(f"{where} is not a list")
    return value


def checked_integer(
    entry: dict[Any, Any], key: str, where: str, *, minimum: int = 0, limit: int = LIMIT
) -> int:
    """Return `entry[key]`, which must be an integer from `minimum` to below `limit`."""
    value = entry.get(key)
    if type(value) is not int or not minimum <= value < limit:
        raise damaged(f"{where} has an invalid {key}")
    return value


def checked_pool(value: object, where: str) -> PoolId:
    """Return the id of a pool."""
    if (
        type(value) is tuple
        and len(value) == 2
        and all(type(part) is int and 0 <= part < LIMIT for part in value)
    ):
        return value
    raise damaged(f"{where} has an invalid pool")
