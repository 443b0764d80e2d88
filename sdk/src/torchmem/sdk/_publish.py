"""Publishing files by atomic replace: the sample in the run directory, and node_exporter's textfile."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from torchmem.core.rundir import RUN_DIR_MODE, SAMPLE_SUFFIX

# Without an exporter nobody removes the last words of processes long gone.
FORGOTTEN_AFTER_SECONDS = 24 * 3600


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old or the new content, never a part; readable by everyone.

    Raises OSError when the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # the exporter may be another user, and umask may say 077
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RunFile:
    """This process's one file in the run directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self._swept = False

    def write(self, content: bytes) -> None:
        """Publish; a directory that vanished is made again. Raises OSError."""
        make_run_directory(self.path.parent)
        replace_file(self.path, content)
        if not self._swept:
            self._swept = True
            sweep(self.path.parent, time.time() - FORGOTTEN_AFTER_SECONDS)

    def remove(self) -> None:
        """Take the file back, as a forked child or a closed session does. Raises OSError."""
        self.path.unlink(missing_ok=True)


def make_run_directory(directory: Path) -> None:
    """Create the run directory, writable by all users with the sticky bit; raises OSError.

    A symbolic link that another user put in its place is refused.
    """
    try:
        directory.mkdir(parents=True)
        directory.chmod(RUN_DIR_MODE)
    except FileExistsError:
        if not directory.is_dir():
            raise
        status = directory.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in {0, os.getuid()}:
            raise PermissionError(f"{directory} is a symbolic link of another user") from None


def sweep(directory: Path, before: float) -> None:
    """Remove sample files of this user that were last written before the Unix time `before`."""
    for path in directory.glob(f"*{SAMPLE_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_mtime < before:
                path.unlink()
