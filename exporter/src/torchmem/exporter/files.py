"""Opening files of a directory that anybody may write to: no links, regular files only, bounded size and number."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torchmem.exporter.refusals import RefusedError
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX

MAX_ENTRIES = 16384

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FileVersion:
    """One version of one file; the change time, which its owner cannot set, tells versions apart."""

    name: str
    inode: int
    size: int
    changed_ns: int
    mtime: float
    uid: int
    regular: bool


@contextmanager
def open_directory(path: Path) -> Iterator[int | None]:
    """A descriptor of the directory for the calls below; None when there is no such directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def scan(directory: int) -> list[FileVersion]:
    """Every sample file, newest first, of at most MAX_ENTRIES directory entries."""
    found = []
    with os.scandir(directory) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if entry.name.endswith(SAMPLE_SUFFIX):
                try:
                    found.append(_version(entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    return sorted(found, key=lambda version: version.changed_ns, reverse=True)


def read(directory: int, listed: FileVersion) -> tuple[FileVersion, bytes]:
    """The file as it is now and its bytes; raises RefusedError, or FileNotFoundError when it has gone."""
    name = listed.name
    if not listed.regular:
        raise RefusedError("not_regular")
    try:
        descriptor = os.open(name, _READ_FLAGS, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        linked = error.errno in {errno.ELOOP, errno.ENXIO}
        raise RefusedError("not_regular" if linked else "unreadable") from error
    try:
        version = _version(name, os.fstat(descriptor))
        if not version.regular:
            raise RefusedError("not_regular")
        return version, _contents(descriptor)
    finally:
        os.close(descriptor)


def _contents(descriptor: int) -> bytes:
    try:
        data = os.read(descriptor, MAX_SAMPLE_BYTES + 1)
    except OSError as error:
        raise RefusedError("unreadable") from error
    if len(data) > MAX_SAMPLE_BYTES:
        raise RefusedError("too_large")
    return data


def _version(name: str, status: os.stat_result) -> FileVersion:
    return FileVersion(
        name,
        status.st_ino,
        status.st_size,
        status.st_ctime_ns,
        status.st_mtime,
        status.st_uid,
        stat.S_ISREG(status.st_mode),
    )
