"""Python's full collection, with a look at what it frees before it does.

Only for a process that dies. The flag `gc.DEBUG_SAVEALL` makes a collection keep what it would
free. Finalizers and callbacks of weak references run in that collection, once, as in any other.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchmem.allocator.snapshot import without_collector
from torchmem.explain.garbage import MAX_TYPES, GarbageType
from torchmem.sample.untrusted import sanitize_text

SECONDS = 0.5
"""CPU time to find the types; if it takes longer, they are not known."""
MAX_BLOCKS = 20_000_000
"""Memory blocks of Python up to which a process is collected: a few seconds."""
MAX_NAMED_BLOCKS = 5_000_000
"""Blocks up to which the types are found, which takes a second collection."""
MAX_DISTANCE = 200
"""Objects that are looked at to find what keeps one tensor."""
OBJECTS_PER_CHECK = 1000

StorageOf = Callable[[object], "tuple[int, int] | None"]
"""Returns the identity and the bytes of a tensor's storage; None for other objects."""

# Past a metaclass of the script, which may define these names.
_module_of = type.__dict__["__module__"].__get__
_name_of = type.__dict__["__name__"].__get__


def can_collect() -> bool:
    """Return whether a collection takes little time, and frees what it finds."""
    is_saving = gc.get_debug() & gc.DEBUG_SAVEALL
    return not is_saving and sys.getallocatedblocks() <= MAX_BLOCKS


def collect(storage_of: StorageOf) -> tuple[GarbageType, ...]:
    """Run a full collection; return the types whose objects kept tensors, most bytes first."""
    if sys.getallocatedblocks() > MAX_NAMED_BLOCKS:
        gc.collect()
        return ()
    start, flags = len(gc.garbage), gc.get_debug()
    try:
        with without_collector():
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                gc.collect()
            finally:
                gc.set_debug(flags)
            return _types(gc.garbage[start:], storage_of, time.thread_time() + SECONDS)
    finally:
        del gc.garbage[start:]
        gc.collect()


def _types(
    garbage: Sequence[object], storage_of: StorageOf, deadline: float
) -> tuple[GarbageType, ...]:
    referrers = _referrers(garbage, deadline)
    if referrers is None:
        return ()
    # By identity: the script's types may define equality.
    owners: dict[int, tuple[object, int]] = {}
    storages: set[int] = set()
    for value in garbage:
        storage = storage_of(value)
        if storage is not None and storage[0] not in storages:
            storages.add(storage[0])
            owner = _owner(value, referrers)
            owners[id(owner)] = owner, owners.get(id(owner), (owner, 0))[1] + storage[1]
            if time.thread_time() > deadline:
                return ()
    return _counted(owners.values())


def _referrers(garbage: Sequence[object], deadline: float) -> dict[int, list[object]] | None:
    """Return which garbage refers to each object of it, by identity; None without enough time."""
    known = set(map(id, garbage))
    found: defaultdict[int, list[object]] = defaultdict(list)
    for number, value in enumerate(garbage):
        for referent in gc.get_referents(value):
            if id(referent) in known:
                found[id(referent)].append(value)
        if number % OBJECTS_PER_CHECK == 0 and time.thread_time() > deadline:
            return None
    return found


def _owner(tensor: object, referrers: dict[int, list[object]]) -> object:
    """Return the closest object that keeps a tensor and has a type that says something."""
    closest = sorted(_around(tensor, referrers), key=_rank)  # stable: the closest comes first
    return closest[0] if closest else tensor


def _around(tensor: object, referrers: dict[int, list[object]]) -> list[object]:
    """Return what refers to a tensor, directly or through others, the closest first."""
    found: list[object] = []
    seen, edge = {id(tensor)}, [tensor]
    while edge and len(found) < MAX_DISTANCE:
        edge = list(_new(edge, referrers, seen))
        found += edge
    return found


def _new(
    edge: Sequence[object], referrers: dict[int, list[object]], seen: set[int]
) -> Iterator[object]:
    for value in edge:
        for referrer in referrers.get(id(value), ()):
            if id(referrer) not in seen:
                seen.add(id(referrer))
                yield referrer


def _rank(value: object) -> int:
    """Return 0 for the script's types and for exceptions, more for PyTorch's and for Python's."""
    kind = type(value)
    module = _module_of(kind)
    package = module.partition(".")[0] if type(module) is str else ""
    if issubclass(kind, BaseException) or package not in {"torch", "builtins", "collections"}:
        return 0
    return 1 if package == "torch" else 2


def _counted(owners: Any) -> tuple[GarbageType, ...]:
    sums: dict[int, list[Any]] = {}
    for owner, size in owners:
        entry = sums.setdefault(id(type(owner)), [type(owner), 0, 0])
        entry[1] += 1
        entry[2] += size
    largest = sorted(sums.values(), key=lambda entry: -entry[2])[:MAX_TYPES]
    return tuple(
        GarbageType(sanitize_text(_name_of(kind)), count, issubclass(kind, BaseException))
        for kind, count, _ in largest
    )
