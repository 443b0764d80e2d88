"""`torchmem whatif`: a job's own allocations under other allocator settings.

Needs no extra. Modules that take long to import are imported when needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.output.terminal import write_out
from torchmem.sample.errors import UsageError

if TYPE_CHECKING:
    from torchmem.whatif.question import WhatIfQuestion

HELP = "replay a memory snapshot's allocations under other allocator settings"
EPILOG = """\
Examples:
  torchmem whatif snapshot.pickle
  torchmem whatif snapshot.pickle --gpu-model t4 --setting max_split_size_mb:256

Exit code: 0 if there is a recommendation for each GPU, 1 if one has none, 2 if
a file or a flag cannot be used.
"""
NO_RECOMMENDATION = 1
"""Exit code if a file was read but its replay does not reproduce it; like grep's for no match."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add(
        "snapshots",
        metavar="SNAPSHOT",
        nargs="+",
        type=Path,
        help="a file of torch.cuda.memory._dump_snapshot or `torchmem capture`",
    )
    add("--gpu", type=int, metavar="N", help="only cuda:N (default: all that have a trace)")
    add(
        "--gpu-model",
        metavar="MODEL",
        help="a name from `torchmem preflight --list-gpu-models`, or a size: 24GB (10^9), "
        "22.5GiB (2^30) (default: from an OOM in the trace, otherwise unlimited)",
    )
    add(
        "--setting",
        metavar="CONF",
        action="append",
        default=[],
        help="try this instead of the usual settings, such as 'max_split_size_mb:256'; repeatable",
    )
    add("--json", action="store_true", help="print one line of JSON per device")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer for each snapshot and return the exit code.

    A file that cannot be used is reported on stderr, and the other files are still answered.

    Raises:
        UsageError: a flag cannot be used.
    """
    question = _question(arguments)
    codes = [
        _answer_or_report(path, question, arguments, is_first=number == 0)
        for number, path in enumerate(arguments.snapshots)
    ]
    return max(codes)


def _question(arguments: argparse.Namespace) -> WhatIfQuestion:
    from torchmem.whatif.question import WhatIfQuestion, check_settings, gpu_model

    gpu = gpu_model(arguments.gpu_model) if arguments.gpu_model else None
    check_settings(arguments.setting)
    return WhatIfQuestion(arguments.gpu, gpu, tuple(arguments.setting))


def _answer_or_report(
    path: Path, question: WhatIfQuestion, arguments: argparse.Namespace, *, is_first: bool
) -> int:
    try:
        return 0 if _answer(path, question, arguments, is_first=is_first) else NO_RECOMMENDATION
    except UsageError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code


def _answer(
    path: Path, question: WhatIfQuestion, arguments: argparse.Namespace, *, is_first: bool
) -> bool:
    """Print the answer for each device; return whether all devices have a recommendation.

    Pages after the first one start with an empty line.
    """
    from torchmem.whatif.page import page
    from torchmem.whatif.question import results
    from torchmem.whatif.result import document

    decided = True
    for result in results(path, question):
        write_out(document(result) if arguments.json else "\n" * (not is_first) + page(result))
        is_first = False
        decided &= result.verdict.decision != "none"
    return decided
