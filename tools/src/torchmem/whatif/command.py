"""Sizes of memory as people type them.

Flags that can be found wrong before any work is done.

`torchmem whatif`: a job's own allocations under other allocator settings; needs no extra but for `--plot`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.allocator.settings import rejection_reason
from torchmem.allocator.sizes import parse_size
from torchmem.sample.errors import MissingExtraError, UsageError
from torchmem.sample.untrusted import sanitize_text


def _card_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--card {error}.") from None


def check_settings(settings: Sequence[str]) -> None:
    """Raise UsageError for a text that PyTorch would refuse in PYTORCH_CUDA_ALLOC_CONF."""
    for text in settings:
        reason = rejection_reason(text)
        if reason is not None:
            raise UsageError(f"--setting: {sanitize_text(reason)}")


def check_plot(path: Path, command: str) -> None:
    """Raise UsageError for a picture that cannot be drawn, before the work that it shows is done."""
    try:
        from torchmem.whatif import plot

        plot.check(path)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{command} --plot", error.name or "", "plot") from error


if TYPE_CHECKING:
    from torchmem.whatif.answer import Options

HELP = "replay a memory snapshot's allocations under other allocator settings"
NO_VERDICT = 1
"""Exit code when a file could be read but the replay does not repeat it, as grep's for nothing found."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = "Exit code: 0 with a verdict for each GPU, 1 when one has none, 2 for a file or flag that is wrong."
    parser.add_argument(
        "snapshots", metavar="SNAPSHOT", nargs="+", type=Path,
        help="file of torch.cuda.memory._dump_snapshot or `torchmem capture`",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=int, metavar="N", help="only this GPU (default: all that have a trace)"
    )
    parser.add_argument(
        "--card", metavar="SIZE",
        help="memory of the card, as 24GB or 22.5GiB, of which the CUDA context takes 0.5 GiB (default: what an OOM in "
        "the trace tells, else unlimited)",
    )  # fmt: skip
    parser.add_argument(
        "--setting", metavar="CONF", action="append", default=[],
        help="try this instead of the usual ones, e.g. 'max_split_size_mb:256'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one line of JSON for each device")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw memory over the trace, as .png or .svg"
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer for each snapshot and return the exit code; raises UsageError when none can be begun.

    A file that cannot be used is one sentence on stderr, and the others are still answered.
    """
    if arguments.plot:
        if len(arguments.snapshots) > 1:
            raise UsageError("--plot draws one snapshot: name only one.")
        check_plot(arguments.plot, "whatif")
    card = _card_bytes(arguments.card) if arguments.card else None
    check_settings(arguments.setting)
    from torchmem.whatif.answer import Options

    options = Options(
        arguments.device, card, tuple(arguments.setting), arguments.plot, arguments.json
    )
    code = 0
    for number, path in enumerate(arguments.snapshots):
        code = max(code, _code(path, options, is_first=not number))
    return code


def _code(path: Path, options: Options, *, is_first: bool) -> int:
    from torchmem.whatif.answer import answer

    try:
        return 0 if answer(path, options, is_first=is_first) else NO_VERDICT
    except UsageError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
