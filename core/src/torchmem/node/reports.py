"""The OOM reports of a run directory: found, read and listed. Any user may have written them."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from torchmem.explain.oom_report import LIST_THEM, OomReport, decode
from torchmem.node.published import Published
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import OOM_REPORT, check_file
from torchmem.sample.run_directory import (
    MAX_REPORT_BYTES,
    MAX_USER_ENTRIES,
    PROCESS_FORM,
    REPORT_SUFFIX,
    SAMPLE_SUFFIX,
    find_files,
)
from torchmem.sample.untrusted import (
    FileProblem,
    UntrustedFileError,
    open_untrusted_directory,
    read_untrusted,
    sanitize_text,
)

WANTED = "an OOM report"
_ADVICE: dict[FileProblem, str] = {
    "not_regular": f"name a report, whose name ends in {REPORT_SUFFIX}; {LIST_THEM}",
    "unreadable": "run as a user who can read it.",
    "no_descriptors": "raise the limit with ulimit -n.",
    "too_large": f"it is not an OOM report; {LIST_THEM}",
}
REPORT_NAME = re.compile(rf"{PROCESS_FORM}-\d+{re.escape(REPORT_SUFFIX)}")


def load(path: Path) -> OomReport:
    """Read a report, which any user may have written. Raise UsageError if it cannot be used."""
    name = sanitize_text(str(path))
    try:
        return decode(read_untrusted(path, MAX_REPORT_BYTES)[0])
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist: {LIST_THEM}") from None
    except UntrustedFileError as error:
        check_file(path, OOM_REPORT, WANTED)
        raise UsageError(f"{name} {error}: {_ADVICE[error.problem]}") from None
    except UsageError as error:
        check_file(path, OOM_REPORT, WANTED)
        raise UsageError(f"{name} {error}") from None


def load_all(
    directory: Path, *, own_only: bool = False, limit: int | None = None
) -> list[tuple[Path, OomReport]]:
    """Return every valid report of this user, newest first. Raise UsageError without any.

    Root gets the reports of all users, unless `own_only`. Reads at most `limit` files, if given.
    """
    reports = []
    paths = _report_paths(directory, os.geteuid() if own_only else os.geteuid() or None)
    for path in paths[:limit]:
        with suppress(UsageError):
            reports.append((path, load(path)))
    if not reports:
        raise _no_report(directory)
    return reports


def newest(directory: Path) -> Path | None:
    """Return the newest report of this user; None without any. Raise UsageError as `load_all`."""
    return next(iter(_report_paths(directory, os.geteuid() or None)), None)


def newest_of(run_dir: Path, item: Published) -> OomReport | None:
    """Return the newest OOM report that the process wrote beside its sample file, if valid."""
    folder, _, sample = item.path.rpartition("/")
    stem = re.escape(sample.removesuffix(SAMPLE_SUFFIX))
    form = re.compile(rf"{stem}-(\d+){re.escape(REPORT_SUFFIX)}")
    with (
        suppress(OSError, UntrustedFileError, UsageError),
        open_untrusted_directory(run_dir / folder, item.uid) as (descriptor, _),
    ):
        name = _last(descriptor, form)
        if name is not None:
            data, _ = read_untrusted(name, MAX_REPORT_BYTES, item.uid, directory=descriptor)
            return decode(data)
    return None


def _last(directory: int, form: re.Pattern[str]) -> str | None:
    """Return the name with the highest number."""
    with os.scandir(directory) as entries:
        matches = [form.fullmatch(entry.name) for entry in islice(entries, MAX_USER_ENTRIES)]
    numbers = {match[0]: int(match[1]) for match in matches if match}
    return max(numbers, key=lambda name: numbers[name], default=None)


def _report_paths(directory: Path, user: int | None) -> list[Path]:
    """Return the paths of a user's reports, newest first; of all users if `None`."""
    try:
        files = find_files(directory, REPORT_NAME.fullmatch, user)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"the run directory {sanitize_text(str(directory))} cannot be read "
            f"({error.strerror or 'unknown'}): name another one with --run-dir."
        ) from None
    regular = [(status.st_mtime, path) for path, status in files if stat.S_ISREG(status.st_mode)]
    return [path for _, path in sorted(regular, reverse=True)]


def _no_report(directory: Path) -> UsageError:
    return UsageError(
        f"no OOM report in {sanitize_text(str(directory))}: a process with sdk.instrument() writes "
        "one there at an OutOfMemoryError; name the run directory with --run-dir."
    )
