"""`torchmem why`: why memory ran out, what holds it, and what to do.

Needs no extra, except for `--thresholds`. Modules that take long to import are
imported when needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.cli.flags import add_process, add_run_directory
from torchmem.output import html_files
from torchmem.output.terminal import write_out
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import run_directory

if TYPE_CHECKING:
    from torchmem.why.answer import Answer
    from torchmem.why.snapshot import SnapshotView
    from torchmem.why.source import NodeSource

HELP = "explain an OutOfMemoryError, a running rank, a memory snapshot or a summary"
EPILOG = """\
Examples:
  torchmem why
  torchmem why --rank 3
  torchmem why snapshot.pickle --leaks
  torchmem why --html why.html

Without arguments, it explains your newest OutOfMemoryError; if there is none,
the running rank that is worst off. It knows a file by its content.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add(
        "files",
        metavar="FILE",
        nargs="*",
        type=Path,
        help="an OOM report, a memory snapshot, or the summary or sample of a run",
    )
    add(
        "--list",
        action="store_true",
        help="list all of your OOM reports (root: of all users)",
    )
    add(
        "--json",
        action="store_true",
        help="print JSON, for a snapshot one line per GPU",
    )
    add("--html", metavar="FILE", type=Path, help="write a page (- for stdout)")
    add_run_directory(parser)
    add(
        "--exporter",
        metavar="URL",
        help="ask this exporter instead, also on another machine; USER:PASSWORD@ before the host",
    )
    _add_rank_flags(parser.add_argument_group("ranks"))
    _add_snapshot_flags(parser.add_argument_group("memory snapshots"))


def _add_rank_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_process(group)
    add(
        "--thresholds",
        type=Path,
        metavar="FILE",
        help="your thresholds of `torchmem manifests rules` (default TORCHMEM_THRESHOLDS, else the "
        "shipped)",
    )


def _add_snapshot_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--at",
        choices=("end", "peak", "oom"),
        help="the moment to look at (default: the OutOfMemoryError if there is one, else the end)",
    )
    add(
        "--leaks",
        action="store_true",
        help="show lines that allocate throughout the recording and never free",
    )
    add("--gpu", type=int, metavar="N", help="only cuda:N (default: all)")
    add("--top", type=int, metavar="N", help="rows of each table (default 12)")


def run(arguments: argparse.Namespace) -> int:
    """Print the answers and return the exit code.

    A file that cannot be used is reported on stderr, and the other files are still answered.

    Raises:
        UsageError: a flag cannot be used, or there is nothing to explain.
        MissingExtraError: `--thresholds` needs an extra.
    """
    _check(arguments)
    if not arguments.files:
        _write(_answer(arguments), arguments)
        return 0
    return max(
        _write_or_report(path, arguments, is_first=number == 0)
        for number, path in enumerate(arguments.files)
    )


def _check(arguments: argparse.Namespace) -> None:
    if arguments.exporter is not None:
        _check_exporter(arguments)
    if arguments.files and (arguments.list or _selection(arguments) != (None,) * 4):
        raise UsageError("name files, or choose with --list, --rank, --run, --launch or --pid.")
    if arguments.html:
        html_files.check(arguments.html)
        if arguments.list:
            raise UsageError("--html shows one report: name it, without --list.")
    if arguments.top is not None and arguments.top < 1:
        raise UsageError(f"--top must be at least 1, not {arguments.top}.")
    if arguments.html and len(arguments.files) > 1:
        raise UsageError("--html shows one file: name only one.")


def _check_exporter(arguments: argparse.Namespace) -> None:
    if arguments.files:
        raise UsageError("an exporter shows no files: leave out the files, or --exporter.")
    if arguments.thresholds:
        raise UsageError("an exporter has thresholds of its own: leave out --thresholds.")


def _selection(arguments: argparse.Namespace) -> tuple[Any, ...]:
    return arguments.rank, arguments.run_name, arguments.pid, arguments.launch


def _answer(arguments: argparse.Namespace) -> Answer:
    """Return the answer without a file. Raise TorchmemError if there is nothing to explain."""
    from torchmem.node.ranks import ProcessFilter
    from torchmem.why.node_answers import NodeTools

    if _view(arguments) != _view(None):
        raise UsageError("--at, --leaks, --gpu and --top look into a memory snapshot: name one.")
    wanted, source = ProcessFilter(*_selection(arguments)), _source(arguments)
    node = NodeTools(source)
    if not arguments.list:
        return node.why(wanted) if wanted != ProcessFilter() else node.most_urgent()
    listed = node.oom_reports(limit=None)
    if not listed.data["reports"]:
        raise UsageError(
            f"{source.name} has no OOM report: a process with sdk.instrument() writes one at an "
            f"OutOfMemoryError; {source.elsewhere}."
        )
    return listed


def _source(arguments: argparse.Namespace) -> NodeSource:
    """Return where the ranks are: at an exporter, else in a run directory."""
    from torchmem.cli.http import exporter_url
    from torchmem.why.exporter import ExporterNode
    from torchmem.why.local import LocalNode

    if arguments.exporter is not None:
        return ExporterNode(exporter_url(arguments.exporter))
    return LocalNode(arguments.run_dir or run_directory(os.environ), arguments.thresholds)


def _write_or_report(path: Path, arguments: argparse.Namespace, *, is_first: bool) -> int:
    from torchmem.why.file import file_answer

    try:
        answer = file_answer(path, _view(arguments), arguments.thresholds)
        _write(answer, arguments, is_first=is_first)
    except UsageError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _view(arguments: argparse.Namespace | None) -> SnapshotView:
    from torchmem.why.snapshot import DEFAULT_ROWS, SnapshotView

    if arguments is None:
        return SnapshotView()
    return SnapshotView(arguments.at, arguments.gpu, arguments.top or DEFAULT_ROWS, arguments.leaks)


def _write(answer: Answer, arguments: argparse.Namespace, *, is_first: bool = True) -> None:
    """Write an answer; one that follows another starts with an empty line."""
    if arguments.html:
        html_files.write(answer.page(), arguments.html)
    if arguments.html != html_files.STDOUT:
        if arguments.json:
            write_out("".join(f"{line}\n" for line in answer.json_lines()))
        else:
            write_out("\n" * (not is_first) + answer.words())
