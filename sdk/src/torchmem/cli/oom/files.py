"""Finding OOM reports in the run directory, where anybody may have put anything."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from torchmem.core.errors import UsageError
from torchmem.core.files import UntrustedFileError, read_untrusted
from torchmem.core.report import OomReport, decode
from torchmem.core.rundir import MAX_REPORT_BYTES, REPORT_SUFFIX
from torchmem.core.untrusted import harmless

_NAME = re.compile(r"\d+-\d+-\d+-\d+" + re.escape(REPORT_SUFFIX))


def load(path: Path) -> OomReport:
    """One report; raises UsageError when it cannot be used."""
    name = harmless(str(path))
    try:
        return decode(read_untrusted(path, MAX_REPORT_BYTES)[0])
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist: `torchmem oom --list` shows the reports there are.") from None
    except UntrustedFileError as error:
        raise UsageError(f"{name} {error}: name another report, or run as a user who may read it.") from None
    except UsageError as error:
        raise UsageError(f"{name} {error}") from None


def load_all(directory: Path) -> list[tuple[Path, OomReport]]:
    """Every sound report of the directory, newest first; raises UsageError when there is none."""
    found = []
    for path in _reports(directory):
        with suppress(UsageError):
            found.append((path, load(path)))
    if not found:
        raise _nothing(directory)
    return found


def newest(directory: Path) -> Path:
    """The newest report: the caller's own if there is one, else anybody's; raises UsageError when there is none."""
    reports = _reports(directory)
    own = [path for path in reports if _owner(path) == os.getuid()]
    if not reports:
        raise _nothing(directory)
    return (own or reports)[0]


def _reports(directory: Path) -> list[Path]:
    try:
        names = [entry.name for entry in os.scandir(directory) if _NAME.fullmatch(entry.name)]
    except OSError as error:
        reason = error.strerror or "unknown"
        raise UsageError(
            f"the run directory {harmless(str(directory))} cannot be read ({reason}): name another with --run-dir."
        ) from None
    return sorted((directory / name for name in names), key=_written, reverse=True)


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _owner(path: Path) -> int | None:
    with suppress(OSError):
        return path.lstat().st_uid
    return None


def _nothing(directory: Path) -> UsageError:
    return UsageError(
        f"no OOM report in {harmless(str(directory))}: a process with sdk.instrument() writes one there at an "
        "OutOfMemoryError; name the run directory with --run-dir."
    )
