"""Give back the memory that only the start needs.

Imports, and the search for the package of `pynvml`, need several MiB for a moment. glibc keeps them
for later allocations, in an arena for each thread.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

_M_ARENA_MAX = -8  # of malloc.h
_ARENAS = 1  # a thread has Python's lock while it allocates, so threads do not wait for each other


def share_arena() -> None:
    """Let all threads that start from here on allocate from one arena. Only glibc has arenas."""
    set_option = _of_libc("mallopt")
    if set_option:
        set_option(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return free memory to the kernel, and leave what remains out of later garbage collections."""
    gc.collect()
    gc.freeze()
    trim = _of_libc("malloc_trim")
    if trim:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it has no such function, as musl."""
    return getattr(ctypes.CDLL(None), name, None)
