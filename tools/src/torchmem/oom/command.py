"""`torchmem oom`: explain why a process ran out of GPU memory, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchmem.cli.gpus import gpu_indices
from torchmem.cli.terminal import write_out
from torchmem.explain.oom_report import OomReport, decode
from torchmem.oom import text
from torchmem.oom.recorded import leak_documents, recorded_leaks, sentence
from torchmem.pages import output
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import OOM_REPORT, check_file
from torchmem.sample.run_directory import (
    MAX_REPORT_BYTES,
    PROCESS_FORM,
    REPORT_SUFFIX,
    find_files,
    run_directory,
)
from torchmem.sample.untrusted import FileProblem, UntrustedFileError, read_untrusted, sanitize_text
from torchmem.snapshot.leaks import Leak

HELP = "explain why an instrumented process ran out of memory"
EPILOG = """\
Examples:
  torchmem oom
  torchmem oom --list
  torchmem oom --html oom.html
"""
WANTED = "an OOM report"
_LIST = "run `torchmem oom --list` for a list of reports."
_ADVICE: dict[FileProblem, str] = {
    "not_regular": f"name a report, whose name ends in {REPORT_SUFFIX}; {_LIST}",
    "unreadable": "run as a user who can read it.",
    "no_descriptors": "raise the limit with ulimit -n.",
    "too_large": f"it is not an OOM report; {_LIST}",
}
REPORT_NAME = re.compile(rf"{PROCESS_FORM}-\d+{re.escape(REPORT_SUFFIX)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", type=Path, help="report (default: the newest one)")
    add("--run-dir", metavar="DIR", type=Path, help="run directory (default TORCHMEM_RUN_DIR)")
    add(
        "--list",
        action="store_true",
        help="list all of your reports in the run directory (root: of all users)",
    )
    add("--json", action="store_true", help="print the reports as JSON, one per line")
    add("--html", metavar="FILE", type=Path, help="write the report as a page (- for stdout)")


def run(arguments: argparse.Namespace) -> int:
    """Print a report, or a list. Raise UsageError if there is none or it cannot be read."""
    if arguments.html:
        _check_page(arguments)
    directory = arguments.run_dir or run_directory(os.environ)
    if arguments.list:
        reports = load_all(directory)
    else:
        path = arguments.file or newest(directory)
        reports = [(path, load(path))]
    if arguments.json:
        leaking = () if arguments.list else recorded_leaks(*reports[0])
        documents = (document(report, leaking) for _, report in reports)
        lines = (json.dumps(each, allow_nan=False) for each in documents)
        words = "".join(f"{line}\n" for line in lines)
    else:
        words = text.table(reports) if arguments.list else _page(*reports[0])
    if arguments.html:
        _write_page(arguments.html, *reports[0])
    if arguments.html != output.STDOUT:
        write_out(words)
    return 0


def _check_page(arguments: argparse.Namespace) -> None:
    if arguments.list:
        raise UsageError("--html shows one report: name it, without --list.")
    output.check(arguments.html)


def _write_page(path: Path, source: Path, report: OomReport) -> None:
    from torchmem.oom.html import page

    output.write(page(source, report, gpu_indices(), recorded_leaks(source, report)), path)


def document(report: OomReport, leaking: Sequence[Leak] = ()) -> dict[str, Any]:
    """Return a report for JSON: the file, with the verdict in words.

    `verdict` is public: `cause`, `onset`, `headline`, and `gains`, what each change would have
    freed. `onset` is None where it is unknown; `gains` is empty if no change would have made room.
    `leaks` are the lines that leak according to a recording beside the report.
    """
    verdict = report.verdict
    words = {
        "cause": report.oom.cause,
        "detail": report.oom.detail,
        "onset": report.oom.onset,
        "headline": sentence(report, leaking),
        "gains": [asdict(gain) for gain in verdict.gains] if verdict else [],
        "leaks": leak_documents(leaking),
        "why": asdict(verdict.why) if verdict and verdict.why else None,
    }
    return {**asdict(report), "verdict": words}


def _page(path: Path, report: OomReport) -> str:
    return text.page(path, report, gpu_indices(), recorded_leaks(path, report))


def load(path: Path) -> OomReport:
    """Read a report, which any user may have written. Raise UsageError if it cannot be used."""
    name = sanitize_text(str(path))
    try:
        return decode(read_untrusted(path, MAX_REPORT_BYTES)[0])
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist: {_LIST}") from None
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


def newest(directory: Path) -> Path:
    """Return the newest report of this user. Raise UsageError without any."""
    paths = _report_paths(directory, os.geteuid() or None)
    if not paths:
        raise _no_report(directory)
    return paths[0]


def _report_paths(directory: Path, user: int | None) -> list[Path]:
    """Return the paths of a user's reports, newest first; of all users if `None`."""
    try:
        files = find_files(directory, REPORT_NAME.fullmatch, user)
    except FileNotFoundError:
        raise _no_report(directory) from None
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
