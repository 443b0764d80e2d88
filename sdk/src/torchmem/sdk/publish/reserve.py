"""Room for the last files of a process on a file system that other processes may fill."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from torchmem.sample.run_directory import replace_file

FULL = {errno.ENOSPC, errno.EDQUOT}


class Reserve:
    """A file that gives its room to another one when the file system is full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, size: int) -> None:
        """Reserve room for `size` bytes, unless it is already reserved or there is none."""
        with contextlib.suppress(OSError):
            if not self._path.exists():
                _allocate(self._path, size)

    def release(self) -> None:
        """Release the reserved room. Raises OSError."""
        self._path.unlink(missing_ok=True)

    def take(self, path: Path) -> None:
        """Make a file that is not needed the reserve. Raises OSError."""
        path.rename(self._path)

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a file as `replace_file` does, in the reserved room if necessary. Raises OSError.

        A file in reserved room keeps its size and is padded with spaces, which JSON allows: blocks
        that are given back are another user's at once. The file that it replaces is the next
        reserve.
        """
        try:
            replace_file(path, content)
        except OSError as error:
            if error.errno not in FULL or not self._spend(path, content):
                raise

    def _spend(self, path: Path, content: bytes) -> bool:
        replaced = self._path.with_name(f"{self._path.name}d")
        with contextlib.suppress(OSError):
            _overwrite(self._path, content)
            with contextlib.suppress(FileNotFoundError):
                path.rename(replaced)
            self._path.rename(path)
            with contextlib.suppress(FileNotFoundError):
                replaced.rename(self._path)
            return True
        return False


def _allocate(path: Path, size: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _overwrite(path: Path, content: bytes) -> None:
    """Write into the blocks that the file has."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rest = memoryview(content.ljust(os.fstat(descriptor).st_size))
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fchmod(descriptor, 0o644)
    finally:
        os.close(descriptor)
