"""Blocks without the garbage collector, in which only reference counts free what is unused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
