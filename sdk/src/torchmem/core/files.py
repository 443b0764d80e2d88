"""Opening a file of the run directory, where anybody may have put anything: regular files only, no links, bounded."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UntrustedFileError(Exception):
    """A file that is not read; its text says why, as the end of a sentence that begins with the file."""


@contextmanager
def open_untrusted(path: Path, most_bytes: int, owner: int | None = None) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """The open file and what fstat says of it.

    Raises FileNotFoundError, and UntrustedFileError for all but a readable regular file of at most `most_bytes`, of
    the user `owner` if one is given.
    """
    with os.fdopen(_descriptor(path), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFileError("is not a regular file")
        if owner not in {None, status.st_uid}:
            raise UntrustedFileError("is another user's")
        if status.st_size > most_bytes:
            raise UntrustedFileError(f"is larger than {most_bytes} bytes")
        yield file, status


def _descriptor(path: Path) -> int:
    try:
        return os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        linked = error.errno in {errno.ELOOP, errno.ENXIO}
        raise UntrustedFileError("is not a regular file" if linked else f"cannot be read ({error.strerror})") from error


def read_untrusted(path: Path, most_bytes: int, owner: int | None = None) -> tuple[bytes, os.stat_result]:
    """The whole file; raises what `open_untrusted` raises."""
    with open_untrusted(path, most_bytes, owner) as (file, status):
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UntrustedFileError(f"is larger than {most_bytes} bytes")
    return data, status
