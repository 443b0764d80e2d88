"""The summaries of runs in a directory: found, read, and made for processes that left none."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchmem.explain.oom_report import OomReport
from torchmem.explain.run_summary import (
    MAX_SUMMARY_BYTES,
    SUMMARY_SUFFIX,
    RunSummary,
    decode,
    summarize,
)
from torchmem.host.process_table import ProcessTable, process_key, process_state
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import REPORT_SUFFIX, SAMPLE_SUFFIX, find_files
from torchmem.sample.sample import Sample, read_sample
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_text


def summaries(directory: Path, user: int | None) -> list[tuple[Path, RunSummary]]:
    """Return the summaries in a run directory, the newest first, also of processes without one.

    user: whose files; None for those of all. A process that died without an end is summarized from
    its last sample. Raises UsageError if the directory cannot be read.
    """
    return _summaries(directory, lambda: find_files(directory, _is_summary, user))


def summaries_below(path: Path) -> list[tuple[Path, RunSummary]]:
    """Return the summaries in a directory, which may be a run directory or have copies of files.

    Raises UsageError if the directory cannot be read.
    """
    return _summaries(path, lambda: _all_in(path))


def steps_since(path: Path, report: OomReport) -> int | None:
    """Return how many steps have ended since an OOM, given the path of its report; None if unknown.

    The sample of the process beside the report tells, and after its end the summary.
    """
    stem = path.name.removesuffix(REPORT_SUFFIX).rpartition("-")[0]
    sample = read_sample(path.with_name(f"{stem}{SAMPLE_SUFFIX}"))
    found: Sample | RunSummary | None = sample
    if found is None:
        with suppress(UsageError):
            found = read_summary(path.with_name(f"{stem}{SUMMARY_SUFFIX}"))
    if found is None or process_key(found.process) != process_key(report.process):
        return None
    count = found.steps if isinstance(found, RunSummary) else found.steps.count
    return max(0, count - report.steps.count)


def _all_in(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """Return the summaries of a run directory, and those copied to a directory. Raises OSError."""
    own = (path for path in directory.iterdir() if _is_summary(path.name))
    return [*((path, path.lstat()) for path in own), *find_files(directory, _is_summary)]


def _is_summary(name: str) -> bool:
    return name.endswith((SUMMARY_SUFFIX, SAMPLE_SUFFIX))


def _summaries(
    directory: Path, find: Callable[[], list[tuple[Path, os.stat_result]]]
) -> list[tuple[Path, RunSummary]]:
    try:
        files = find()
    except OSError as error:
        raise UsageError(
            f"{sanitize_text(str(directory))} cannot be read ({error.strerror}): name another "
            "directory."
        ) from None
    regular = (path for path, status in files if stat.S_ISREG(status.st_mode))
    found: dict[str, tuple[Path, RunSummary]] = {}
    for path in sorted(regular, key=lambda path: path.name.endswith(SAMPLE_SUFFIX)):
        key = str(path).removesuffix(SUMMARY_SUFFIX).removesuffix(SAMPLE_SUFFIX)
        if key not in found:
            with suppress(UsageError):
                found[key] = path, read_summary(path)
    return sorted(found.values(), key=lambda pair: -pair[1].timestamp)


def read_summary(path: Path) -> RunSummary:
    """Return the summary in a file, or that of a sample. Raises UsageError."""
    if path.name.endswith(SAMPLE_SUFFIX):
        return last_summary(path)
    try:
        return decode(read_untrusted(path, MAX_SUMMARY_BYTES)[0])
    except (OSError, UntrustedFileError, UsageError) as error:
        raise UsageError(f"{sanitize_text(str(path))} {error}") from None


def last_summary(path: Path) -> RunSummary:
    """Return the summary of a process that has left only its sample. Raises UsageError."""
    sample = read_sample(path)
    if sample is None:
        name = sanitize_text(str(path))
        raise UsageError(f"{name} is not a valid sample of a process: name another file.")
    now = time.time()
    status = ProcessTable().locate(sample.process)
    with suppress(OSError):
        silent = max(0.0, now - path.stat().st_mtime)
        return summarize(sample, process_state(sample, status, now, silent))
    return summarize(sample, process_state(sample, status, now, 0.0))
