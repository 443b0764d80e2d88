"""Ranks and world sizes to be tried."""

from __future__ import annotations

import argparse
import re

from torchmem.core.errors import UsageError
from torchmem.preflight.plan import Placement

RANKS_PER_NODE = 8
MOST_RUNS = 256


def checked_places(arguments: argparse.Namespace) -> tuple[Placement | None, tuple[Placement, ...]]:
    """The place of the single run, and those of a sweep; raises UsageError."""
    rank, world, local = arguments.rank, arguments.world_size, arguments.local_world_size
    if arguments.world_sizes:
        if world is not None:
            raise UsageError("--world-size and --world-sizes contradict each other: give one of them.")
        sizes = numbers("--world-sizes", arguments.world_sizes)
        return None, tuple(place(rank or 0, size, local) for size in sizes)
    if world is None:
        if rank is not None or local is not None or arguments.ranks:
            raise UsageError("a rank is one of how many? Tell it with --world-size.")
        return None, ()
    if not arguments.ranks:
        return place(rank or 0, world, local), ()
    if rank is not None:
        raise UsageError("--rank and --ranks contradict each other: give one of them.")
    return None, tuple(place(one, world, local) for one in numbers("--ranks", arguments.ranks))


def place(rank: int, world: int, local: int | None) -> Placement:
    """One rank; raises UsageError for one that the world does not have."""
    if world < 1 or not 0 <= rank < world:
        raise UsageError(f"there is no rank {rank} in a world of {world}: ranks are counted from 0.")
    node = min(RANKS_PER_NODE, world) if local is None else local
    if not 1 <= node <= world:
        raise UsageError(f"--local-world-size {node} is not possible in a world of {world}.")
    return Placement(rank, world, node)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """The numbers of "0..3,7", each once; raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\.\.([0-9]{1,9}))?\s*", part)
        if not match:
            raise UsageError(f"{flag} {text[:60]!r} is no list of numbers: write it as 0..3,7.")
        first, last = int(match[1]), int(match[2] or match[1])
        found.extend(range(first, min(last, first + MOST_RUNS) + 1))
    if not found or len(found) > MOST_RUNS:
        raise UsageError(
            f"{flag} {text[:60]!r} asks for {'no' if not found else 'too many'} runs: name 1 to {MOST_RUNS}."
        )
    return tuple(dict.fromkeys(found))
