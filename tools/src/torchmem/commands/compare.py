"""`torchmem compare`: whether a run takes more memory than another one, by the files they left."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torchmem.cli.flags import add_run_directory
from torchmem.output.terminal import write_out
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import run_directory

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "say what changed between two runs, and whether it is a regression"
EPILOG = """\
A file is the summary that each run leaves in the run directory, an OOM report,
the output of `torchmem preflight --json`, a baseline, or a memory snapshot.

Examples:
  torchmem compare --list
  torchmem compare before.summary.json after.summary.json
  torchmem compare before.summary.json after.summary.json --markdown pr.md

Exit code: 0 without a regression, 1 with one, 2 if the files cannot be
compared. It is a regression if the second run does not fit and the first did,
or if its peak is higher by more than --max-peak-increase.
"""
DEFAULT_INCREASE = "2%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("before", metavar="BEFORE", nargs="?", type=Path, help="file or directory of the older run")
    add("after", metavar="AFTER", nargs="?", type=Path, help="file or directory of the newer run")
    add(
        "--max-peak-increase",
        metavar="PERCENT",
        default=DEFAULT_INCREASE,
        help=f"how much the peak may grow before it is a regression (default {DEFAULT_INCREASE}%)",
    )
    add("--json", action="store_true", help="print one JSON document")
    add(
        "--markdown",
        metavar="FILE",
        type=Path,
        help="write the comparison for the comment of a pull request",
    )
    add("--list", action="store_true", help="list the summaries of your runs (root: of all users)")
    add_run_directory(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison or the list, and return the exit code. Raises UsageError."""
    if arguments.list:
        return _list(arguments)
    if arguments.before is None or arguments.after is None:
        raise UsageError(
            "two files are needed, the older one first: run `torchmem compare --list` for the "
            "summaries of your runs."
        )
    from torchmem.compare import markdown, page
    from torchmem.compare.baseline import check_output, parse_tolerance
    from torchmem.compare.reading import read_side
    from torchmem.compare.verdict import compare

    tolerance = parse_tolerance(arguments.max_peak_increase)
    check_output(arguments.markdown)
    found = compare(read_side(arguments.before), read_side(arguments.after), tolerance)
    if arguments.markdown:
        markdown.write(arguments.markdown, page.comment(found))
    write_out(page.document(found) if arguments.json else page.page(found))
    return found.exit_code


def _list(arguments: argparse.Namespace) -> int:
    from torchmem.compare import page
    from torchmem.node.summaries import summaries

    if arguments.before is not None:
        raise UsageError("--list takes no files: leave them out, or name a --run-dir.")
    directory = arguments.run_dir or run_directory(os.environ)
    found = summaries(directory, os.geteuid() or None)
    if not found:
        raise UsageError(
            f"no summary in {directory}: a process with sdk.instrument() leaves one there at its "
            "end; name the run directory with --run-dir."
        )
    write_out(page.listing(found))
    return 0
