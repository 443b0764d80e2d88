"""What the traceback of the last error keeps at a prompt or in a notebook.

Python keeps it in `sys.last_traceback` until the next error, and with it the local variables of all
functions that the error has passed. No collection frees them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

from torchmem.sdk.oom.garbage_types import StorageOf

MAX_FRAMES = 200
MAX_VALUES = 10_000


def kept_by_last_error(storage_of: StorageOf) -> int:
    """Return the bytes of tensors that only functions of the last error keep, or lists in them.

    Runs no code of the script, and changes no frame, as reading `f_locals` does. It is the least:
    what an object keeps that a function keeps is not looked for.
    """
    # Each tensor with how often it was found; a list refers to it once more.
    found: dict[int, list[Any]] = {}
    for value in islice(_values(), MAX_VALUES):
        if storage_of(value) is not None:
            found.setdefault(id(value), [value, 0])[1] += 1
    # The variable of the loop would count as a reference.
    value = None
    nothing = [object(), 0]
    unshared = sys.getrefcount(nothing[0])
    only_here = (
        storage_of(entry[0])
        for entry in found.values()
        if sys.getrefcount(entry[0]) - unshared == entry[1]
    )
    return sum(dict(filter(None, only_here)).values())


def _values() -> Iterator[object]:
    """Yield what local variables refer to, and what lists, tuples and dicts in them contain."""
    for frame in islice(_frames(), MAX_FRAMES):
        for value in gc.get_referents(frame):
            yield value
            # The variables of a module are alive.
            if _is_container(value) and value is not frame.f_globals:
                yield from gc.get_referents(value)


def _is_container(value: object) -> bool:
    kind = type(value)  # by identity: a metaclass of the script may define equality
    return kind is list or kind is tuple or kind is dict


def _frames() -> Iterator[FrameType]:
    traceback = getattr(sys, "last_traceback", None)
    while isinstance(traceback, TracebackType):
        yield traceback.tb_frame
        traceback = traceback.tb_next
