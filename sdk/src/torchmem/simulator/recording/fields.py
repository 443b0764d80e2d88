"""Fields of an unpickled snapshot: each has exactly the type that PyTorch writes, and numbers are within 63 bits."""

from __future__ import annotations

from typing import Any

from torchmem.simulator.recording.refusal import damaged
from torchmem.simulator.recording.trace import PoolId

LIMIT = 1 << 63
MAX_DEVICES = 128  # C10_COMPILE_TIME_MAX_GPUS is 120


def a_dict(found: object, where: str) -> dict[Any, Any]:
    """`found`; raises RefusedError unless it is a dict."""
    if type(found) is not dict:
        raise damaged(f"{where} is no dict")
    return found


def a_list(found: object, where: str) -> list[Any]:
    """`found`; raises RefusedError unless it is a list."""
    if type(found) is not list:
        raise damaged(f"{where} is no list")
    return found


def a_number(entry: dict[Any, Any], key: str, where: str, *, least: int = 0, most: int = LIMIT) -> int:
    """The integer `entry[key]`; raises RefusedError unless it is in [least, most)."""
    found = entry.get(key)
    if type(found) is not int or not least <= found < most:
        raise damaged(f"{where} has a wrong {key}")
    return found


def a_pool(found: object, where: str) -> PoolId:
    """A pool's identity; raises RefusedError unless it is a pair of integers."""
    if type(found) is tuple and len(found) == 2 and all(type(part) is int and 0 <= part < LIMIT for part in found):
        return found
    raise damaged(f"{where} has a wrong pool")
