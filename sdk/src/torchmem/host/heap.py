"""The heap of this process: freed memory that the C library keeps."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def return_freed_memory() -> None:
    """Return freed memory to the system (`malloc_trim` of glibc); nothing with other C libraries.

    Takes about 1 ms after 40 MiB were freed. The GIL is released meanwhile.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
