"""The run directory: where every process publishes its one file and the exporter finds them."""

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
    """`TORCHMEM_RUN_DIR`, else /run/torchmem when it exists (the exporter's service made it), else /tmp/torchmem."""
    named = environment.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    return system if system.is_dir() else FALLBACK_RUN_DIR


def sample_name(pid: int, pid_namespace: int | None, start_ticks: int | None) -> str:
    """A file name that no other process of this node can own, across pid namespaces and pid reuse."""
    return f"{pid_namespace or 0}-{pid}-{start_ticks or 0}{SAMPLE_SUFFIX}"


def report_name(sample: str, number: int) -> str:
    """File name of the process's OOM report `number`, from the name of its sample."""
    return f"{sample.removesuffix(SAMPLE_SUFFIX)}-{number}{REPORT_SUFFIX}"


_writes = itertools.count()


def temporary_beside(path: Path) -> Path:
    """A name of its own for each write: several threads may replace a file at once."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_writes)}{TEMPORARY_SUFFIX}")


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old or the new content, never a part; readable by everyone.

    Raises OSError when the directory cannot be written.
    """
    temporary = temporary_beside(path)
    try:
        _write_new(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_new(path: Path, content: bytes) -> None:
    descriptor = _create(path)
    try:
        os.fchmod(descriptor, 0o644)  # the exporter may be another user, and umask may say 077
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _create(path: Path) -> int:
    """Descriptor of a file that is certainly new, whatever was left or put in its place."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, 0o644)
