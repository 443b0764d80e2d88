"""The run directory, where processes publish files that the exporter and the commands read.

Every user of the node may write to it. Each user's files are in a directory of that user's own,
whose name is the user ID. If another user has taken that name, the owner's processes share a
directory whose name has 16 random hex digits appended. Only the owner of such a directory can put
files into it, which readers verify on the opened directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from torchmem.sample.untrusted import UntrustedFileError, open_untrusted_directory

ENVIRONMENT_VARIABLE = "TORCHMEM_RUN_DIR"
SYSTEM_RUN_DIR = Path("/run/torchmem")
FALLBACK_RUN_DIR = Path("/tmp/torchmem")  # noqa: S108 - shared, and not trusted
MAX_ENTRIES = 1 << 18  # entries of the run directory that a reader looks at; only names are read
MAX_USER_ENTRIES = 1 << 14  # entries of one user's directory that a reader looks at
DEFAULT_TTL_SECONDS = 900.0  # how long the last values of a process that ended are exported
RUN_DIR_MODE = 0o1777
SAMPLE_SUFFIX = ".sample.json"
REPORT_SUFFIX = ".oom.json"
TEMPORARY_SUFFIX = ".tmp"
RESERVE_SUFFIX = ".reserve"
MAX_SAMPLE_BYTES = 256 * 1024
MAX_REPORT_BYTES = 64 * 1024


def run_directory(environment: Mapping[str, str], system: Path = SYSTEM_RUN_DIR) -> Path:
    """Return the run directory.

    It is `TORCHMEM_RUN_DIR` if set, else /run/torchmem if the exporter's service has created it,
    else /tmp/torchmem.
    """
    configured = environment.get(ENVIRONMENT_VARIABLE)
    if configured:
        return Path(configured)
    return system if system.is_dir() else FALLBACK_RUN_DIR


PROCESS_FORM = r"\d+-\d+-\d+"
"""Regular expression for the start of a name from `sample_name`."""

_USER_DIRECTORY = re.compile(r"(0|[1-9][0-9]{0,9})(-[0-9a-f]{16})?")


def is_user_directory(name: str) -> bool:
    """Return whether `name` has the form of a user's directory; it says nothing about the owner."""
    return _USER_DIRECTORY.fullmatch(name) is not None


def find_files(
    run_dir: Path, matches: Callable[[str], object], user: int | None = None
) -> list[tuple[Path, os.stat_result]]:
    """Return the files whose names match and that only their owner could have put there.

    `user`: only files of this user ID; None for those of all users. Raises OSError if the run
    directory cannot be read; what cannot be read in it is skipped.
    """
    with os.scandir(run_dir) as entries:
        names = [entry.name for entry in islice(entries, MAX_ENTRIES)]
    found = list[tuple[Path, os.stat_result]]()
    for name in filter(is_user_directory, names):
        with (
            contextlib.suppress(OSError, UntrustedFileError),
            open_untrusted_directory(run_dir / name, user) as (descriptor, status),
        ):
            with os.scandir(descriptor) as entries:
                own = [entry.name for entry in islice(entries, MAX_USER_ENTRIES)]
            own = [file for file in own if matches(file)]
            found += _owned(run_dir / name, own, descriptor, status.st_uid)
    return found


def _owned(
    folder: Path, names: list[str], descriptor: int, owner: int
) -> Iterator[tuple[Path, os.stat_result]]:
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if status.st_uid == owner:
                yield folder / name, status


def sample_name(pid: int, pid_namespace: int | None, start_ticks: int | None) -> str:
    """Return a file name that is unique on the node, across pid namespaces and reused pids."""
    return f"{pid_namespace or 0}-{pid}-{start_ticks or 0}{SAMPLE_SUFFIX}"


def report_name(sample: str, number: int) -> str:
    """Return the file name of the process's OOM report `number`, given the name of its sample."""
    return f"{sample.removesuffix(SAMPLE_SUFFIX)}-{number}{REPORT_SUFFIX}"


def reserve_path(path: Path) -> Path:
    """Return the path of the file that reserves space for the file `path`."""
    return path.with_name(f".{path.name}{RESERVE_SUFFIX}")


_writes = itertools.count()


def temporary_path(path: Path) -> Path:
    """Return a new path next to `path` for each write, as several threads may replace one file."""
    return path.with_name(_temporary_name(path.name))


def _temporary_name(name: str) -> str:
    return f".{name}.{os.getpid()}.{next(_writes)}{TEMPORARY_SUFFIX}"


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` atomically: a reader sees the old or the new content. Every user can read it.

    Raises OSError when the directory cannot be written.
    """
    folder, _, name = os.fspath(path).rpartition("/")
    # Text, because a Path takes longer to make than the file to write.
    temporary = os.path.join(folder or ".", _temporary_name(name))  # noqa: PTH118
    try:
        _write_new(temporary, content)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
        raise


def _write_new(path: str, content: bytes) -> None:
    descriptor = _create(path)
    try:
        os.fchmod(descriptor, 0o644)  # the exporter may run as another user, and umask may be 077
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _create(path: str) -> int:
    """Create the file, replacing any file or link at that path, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        os.unlink(path)  # noqa: PTH108
        return os.open(path, flags, 0o644)
