"""Ask a rank for its memory map while a viewer requests it.

The rank publishes its map only while it is asked (`torchmem.sample.memory_map`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from torchmem.node.published import Published
from torchmem.sample.memory_map import (
    LEASE_SECONDS,
    REQUEST_SUFFIX,
    granted_users,
    request_directory,
)
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted_directory

TOUCH_SECONDS = 5.0
MAX_ATTEMPTS = 8  # to create a directory that another user replaces again and again


class CannotAskError(Exception):
    """The rank cannot be asked; the text says why, in one sentence."""


class Requests:
    """Asks ranks for their maps, with files in a directory of the exporter's own user."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._touched: dict[str, float] = {}

    def touch(self, rank: Published, now: float) -> None:
        """Ask a rank for its map, or go on asking; `now` in Unix seconds. Raises CannotAskError."""
        if now - self._touched.get(rank.path, 0.0) < TOUCH_SECONDS:
            return
        self._check_granted(rank)
        name = Path(rank.path).name.removesuffix(SAMPLE_SUFFIX)
        folder = request_directory(self._run_dir, os.geteuid())
        try:
            _make_directory(folder)
            with open_untrusted_directory(folder, os.geteuid()) as (directory, _):
                _remove_ended(directory, now)
                _touch(directory, name)
        except (OSError, UntrustedFileError) as error:
            if rank.uid != os.geteuid():
                problem = (
                    f"cannot be written ({error.strerror})" if isinstance(error, OSError) else error
                )
                raise CannotAskError(f"The directory {folder} {problem}.") from error
            self._touch_beside(rank, name + REQUEST_SUFFIX)
        self._touched = {path: at for path, at in self._touched.items() if now - at < LEASE_SECONDS}
        self._touched[rank.path] = now

    def _touch_beside(self, rank: Published, name: str) -> None:
        """Ask in the directory of the rank, whose user is the exporter's. Raises CannotAskError."""
        folder = (self._run_dir / rank.path).parent
        try:
            with open_untrusted_directory(folder, rank.uid) as (directory, _):
                _touch(directory, name)
        except (OSError, UntrustedFileError) as error:
            raise CannotAskError(f"The rank's directory {folder} cannot be written.") from error

    def _check_granted(self, rank: Published) -> None:
        own = os.geteuid()
        with contextlib.suppress(OSError):
            if own in granted_users(self._run_dir, rank.uid):
                return
        raise CannotAskError(
            f"The exporter runs as user {own}, but a rank publishes its map only for its own user, "
            "for root, and for the owner of the run directory."
        )


def _make_directory(path: Path) -> None:
    """Create a directory of the exporter's user unless it exists.

    What another user has put in its place is moved aside, which root and the owner of the run
    directory may do. Raises OSError.
    """
    for _ in range(MAX_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o755)
        with (
            contextlib.suppress(FileNotFoundError, UntrustedFileError),
            open_untrusted_directory(path, os.geteuid()) as (directory, _),
        ):
            os.fchmod(directory, 0o755)  # ranks of other users look into it
            return
        with contextlib.suppress(FileNotFoundError):
            path.rename(f"{path}.{os.urandom(8).hex()}")


def _remove_ended(directory: int, now: float) -> None:
    """Remove requests that were not renewed, including requests of an exporter that was killed."""
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if abs(now - status.st_mtime) > LEASE_SECONDS:
                os.unlink(name, dir_fd=directory)


def _touch(directory: int, name: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o644, dir_fd=directory)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)
