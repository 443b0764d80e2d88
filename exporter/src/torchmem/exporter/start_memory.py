"""Give back the memory that only the start needs.

Imports need several MiB for a moment. glibc keeps them for later allocations, in an arena for each
thread. Most of the pages of shared libraries, too, are read only while the libraries are loaded:
with these pages, the exporter would have 43 MiB instead of 37, above its goal of 40. The largest
library is `ssl`'s, which asyncio and prometheus_client import.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_M_ARENA_MAX = -8  # of malloc.h
_SMAPS = Path("/proc/self/smaps")
_UNCHANGED = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9].*\n(?:\w+:.*\n)*?Anonymous: +0 kB$",
    re.MULTILINE,
)
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
    _drop_code()


def _drop_code() -> None:
    """Drop the pages of shared libraries, which the kernel maps again when they are used."""
    advise = _of_libc("madvise")
    if not advise:
        return
    with suppress(OSError):
        for start, size in unchanged_mappings(_SMAPS.read_text("utf-8", "replace")):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def unchanged_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield start and size of the mappings that are not writable and hold only a file's content.

    `smaps`: the text of /proc/PID/smaps, see proc_pid_smaps(5). A library's relocated data is not
    writable either, but differs from the file, and so does code with a breakpoint.
    """
    for mapping in _UNCHANGED.finditer(smaps):
        start, end = (int(text, 16) for text in mapping.groups())
        yield start, end - start


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, None where it has no such function, as musl."""
    return getattr(ctypes.CDLL(None), name, None)
