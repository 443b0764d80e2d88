"""`torchmem snapshot`: what holds the memory in a snapshot of PyTorch's allocator.

Needs no extra, except for `--plot`. Modules that take long to import are imported when needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.cli import plots
from torchmem.cli.terminal import StatusLine, write_out
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text

if TYPE_CHECKING:
    from torchmem.recording import StackedTrace
    from torchmem.snapshot.holders import Holders
    from torchmem.snapshot.lifetimes import Lifetimes

HELP = "show what holds the memory in a snapshot: by line, module, size, age, and pool"
EPILOG = """\
Examples:
  torchmem snapshot snapshot.pickle --at peak
  torchmem snapshot snapshot.pickle --leaks

To see what grew between two snapshots, run `torchmem compare`.
"""
DEFAULT_ROWS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add(
        "snapshots",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="a file of torch.cuda.memory._dump_snapshot or `torchmem capture`",
    )
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
    add(
        "--top",
        type=int,
        default=DEFAULT_ROWS,
        metavar="N",
        help=f"rows of each table (default {DEFAULT_ROWS})",
    )
    add("--json", action="store_true", help="print one line of JSON per GPU")
    add("--plot", metavar="FILE", type=Path, help="plot memory by line, as .png or .svg")


def run(arguments: argparse.Namespace) -> int:
    """Print the answers and return the exit code.

    A file that cannot be used is reported on stderr, and the other files are still answered.

    Raises:
        UsageError: a flag cannot be used.
    """
    _check(arguments)
    return max([_answer_or_report(path, arguments) for path in arguments.snapshots])


def _check(arguments: argparse.Namespace) -> None:
    if arguments.top < 1:
        raise UsageError(f"--top must be at least 1, not {arguments.top}.")
    if arguments.plot:
        if len(arguments.snapshots) > 1:
            raise UsageError("--plot draws one snapshot: name only one.")
        plots.check(arguments.plot, "snapshot")


def _answer_or_report(path: Path, arguments: argparse.Namespace) -> int:
    try:
        for text in _answers(path, arguments):
            write_out(text)
    except UsageError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _answers(path: Path, arguments: argparse.Namespace) -> list[str]:
    from torchmem.snapshot import document, plot, text
    from torchmem.snapshot.leaks import is_long_enough, leaks

    answers = []
    traces = read_traces(path, arguments.gpu)
    if arguments.plot and len(traces) > 1:
        devices = ", ".join(str(trace.device) for trace in traces)
        raise UsageError(f"--plot draws one GPU: pass --gpu with one of {devices}.")
    for trace in traces:
        lifetimes, found = examine(trace, path, "end" if arguments.leaks else arguments.at)
        if arguments.plot:
            plot.draw(lifetimes, found, arguments.plot)
        if arguments.leaks:
            growing = leaks(lifetimes) if is_long_enough(lifetimes) else None
            page = text.leaks_page(found, growing, arguments.top)
            answers.append(document.leaks_document(found, growing) if arguments.json else page)
        else:
            page = text.page(found, arguments.top)
            answers.append(document.document(found) if arguments.json else page)
    return answers


def read_traces(path: Path, device: int | None) -> Sequence[StackedTrace]:
    """Return the traces of a file, of one device if given. Raise UsageError."""
    from torchmem.recording import read_with_stacks

    label = f"reading {sanitize_text(path.name)}"
    with StatusLine() as status:
        traces = read_with_stacks(path, lambda done, total: status.show(lambda: label, done, total))
    if device is None:
        return traces
    chosen = [trace for trace in traces if trace.device == device]
    if not chosen:
        devices = ", ".join(str(trace.device) for trace in traces)
        raise UsageError(
            f"{sanitize_text(str(path))} has nothing of cuda:{device}: pass --gpu with one of "
            f"{devices}."
        )
    return chosen


def examine(trace: StackedTrace, path: Path, at: str | None) -> tuple[Lifetimes, Holders]:
    """Return what holds the memory at a moment. Raise UsageError without an OutOfMemoryError."""
    from torchmem.snapshot.holders import holders
    from torchmem.snapshot.lifetimes import Lifetimes

    lifetimes = Lifetimes.of(trace)
    if at is None:
        found = holders(lifetimes, "oom") or holders(lifetimes, "end")
    else:
        found = holders(lifetimes, at)  # type: ignore[arg-type]
    if found is None:
        raise UsageError(
            f"{sanitize_text(str(path))} records no OutOfMemoryError: pass --at end or --at peak."
        )
    return lifetimes, found
