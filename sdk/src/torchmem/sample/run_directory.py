"""The run directory, in which each process publishes its files and the exporter finds them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT_VARIABLE = "TORCHMEM_RUN_DIR"
SYSTEM_RUN_DIR = Path("/run/torchmem")
FALLBACK_RUN_DIR = Path("/tmp/torchmem")  # noqa: S108 - shared on purpose; readers trust nothing in it
RUN_DIR_MODE = 0o1777
SAMPLE_SUFFIX = ".sample.json"
REPORT_SUFFIX = ".oom.json"
TEMPORARY_SUFFIX = ".tmp"
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


def sample_name(pid: int, pid_namespace: int | None, start_ticks: int | None) -> str:
    """Return a file name that is unique on the node, across pid namespaces and reused pids."""
    return f"{pid_namespace or 0}-{pid}-{start_ticks or 0}{SAMPLE_SUFFIX}"


def report_name(sample: str, number: int) -> str:
    """Return the file name of the process's OOM report `number`, given the name of its sample."""
    return f"{sample.removesuffix(SAMPLE_SUFFIX)}-{number}{REPORT_SUFFIX}"


_writes = itertools.count()


def temporary_path(path: Path) -> Path:
    """Return a new path next to `path` for each write, as several threads may replace one file."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_writes)}{TEMPORARY_SUFFIX}")


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` atomically: a reader sees the old or the new content. Every user can read it.

    Raises OSError when the directory cannot be written.
    """
    temporary = temporary_path(path)
    try:
        _write_new(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_new(path: Path, content: bytes) -> None:
    descriptor = _create(path)
    try:
        os.fchmod(descriptor, 0o644)  # the exporter may run as another user, and umask may be 077
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _create(path: Path) -> int:
    """Create the file, replacing any file or link at that path, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, 0o644)
