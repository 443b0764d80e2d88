"""`torchmem oom`: why a process ran out of GPU memory, and what to do; needs no extra.

Finding OOM reports in the run directory, where anybody may have put anything.
"""

from __future__ import annotations

import argparse
import os
import re
from contextlib import suppress
from pathlib import Path

from torchmem.allocator.oom_report import OomReport, decode, encode
from torchmem.cli.terminal import write_out
from torchmem.oom import text
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import MAX_REPORT_BYTES, REPORT_SUFFIX, run_directory
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_text

HELP = "explain an OutOfMemoryError that an instrumented process left behind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", type=Path, help="report (default: the newest one)"
    )
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="where to look for reports")
    parser.add_argument("--list", action="store_true", help="list all reports of the run directory")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the reports themselves, one line of JSON for each",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for; raises UsageError when there is no report or it cannot be read."""
    directory = arguments.run_dir or run_directory(os.environ)
    if arguments.list:
        found = load_all(directory)
    else:
        path = arguments.file or newest(directory)
        found = [(path, load(path))]
    if arguments.json:
        write_out("".join(encode(report).decode() for _, report in found))
    else:
        write_out(text.table(found) if arguments.list else text.page(*found[0]))
    return 0


_NAME = re.compile(r"\d+-\d+-\d+-\d+" + re.escape(REPORT_SUFFIX))


def load(path: Path) -> OomReport:
    """One report; raises UsageError when it cannot be used."""
    name = sanitize_text(str(path))
    try:
        return decode(read_untrusted(path, MAX_REPORT_BYTES)[0])
    except FileNotFoundError:
        raise UsageError(
            f"{name} does not exist: `torchmem oom --list` shows the reports there are."
        ) from None
    except UntrustedFileError as error:
        raise UsageError(
            f"{name} {error}: name another report, or run as a user who may read it."
        ) from None
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
            f"the run directory {sanitize_text(str(directory))} cannot be read ({reason}): name another with --run-dir."
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
        f"no OOM report in {sanitize_text(str(directory))}: a process with sdk.instrument() writes one there at an "
        "OutOfMemoryError; name the run directory with --run-dir."
    )
