"""`torchmem why`: why memory ran out, what holds it, and what to do.

Needs no extra, except for `--thresholds`. Modules that take long to import are
imported when needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
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

HELP = "explain an OutOfMemoryError, a rank, a snapshot, an error message or a log"
EPILOG = """\
Examples:
  torchmem why
  torchmem why --rank 3
  torchmem why snapshot.pickle --leaks
  kubectl logs trainer-0 | torchmem why -
  torchmem why --html why.html

Without arguments, it explains your newest OutOfMemoryError; if there is none,
the running rank that is worst off. It knows a file by its content: one that is
no report, snapshot or summary is a text, in which it explains each message that
memory ran out. Several texts are logs of one job. The exit code is 1 if no text
has such a message, and 2 if a file cannot be used.
"""
STDIN = Path("-")
NOTHING_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add(
        "files",
        metavar="FILE",
        nargs="*",
        type=Path,
        help="an OOM report, a memory snapshot, the summary or sample of a run, or any text, such "
        "as an error message or logs (- for stdin)",
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

    A file that cannot be used is reported on stderr, and the other files are still answered. Texts
    are logs of one job, so they have one answer, where the first of them stands.

    Raises:
        UsageError: a flag cannot be used, or there is nothing to explain.
        MissingExtraError: `--thresholds` needs an extra.
    """
    _check(arguments)
    if not arguments.files:
        _write(_answer(arguments), arguments)
        return 0
    texts = [path for path in arguments.files if _is_text(path)]
    groups = [
        texts if path in texts else [path] for path in arguments.files if path not in texts[1:]
    ]
    return max(
        _write_or_report(paths, arguments, is_first=number == 0)
        for number, paths in enumerate(groups)
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


def _is_text(path: Path) -> bool:
    """Return whether a file is a text; False for stdin, and for one that cannot be read."""
    from torchmem.why.file_kind import TEXT, kind_of_path

    with suppress(UsageError):
        return path != STDIN and kind_of_path(path) is TEXT
    return False


def _write_or_report(
    paths: Sequence[Path], arguments: argparse.Namespace, *, is_first: bool
) -> int:
    try:
        answer = _file_answer(paths, arguments)
        _write(answer, arguments, is_first=is_first)
    except UsageError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
    return NOTHING_FOUND if getattr(answer, "is_explained", True) is False else 0


def _file_answer(paths: Sequence[Path], arguments: argparse.Namespace) -> Answer:
    """Return the answer about stdin, about texts, or about one other file. Raise UsageError."""
    if paths == [STDIN]:
        from torchmem.why.stdin import stdin_answer

        _check_text_flags("stdin", arguments)
        return stdin_answer(sys.stdin.buffer)
    if _is_text(paths[0]):
        from torchmem.why.text import explain_files

        _check_text_flags(str(paths[0]), arguments)
        return explain_files(paths)
    from torchmem.why.file import file_answer

    return file_answer(paths[0], _view(arguments), arguments.thresholds)


def _check_text_flags(name: str, arguments: argparse.Namespace) -> None:
    if arguments.at or arguments.leaks or arguments.top or arguments.gpu is not None:
        from torchmem.sample.untrusted import sanitize_text

        raise UsageError(
            f"--at, --leaks, --gpu and --top look into a memory snapshot: {sanitize_text(name)} is "
            "a text."
        )


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
