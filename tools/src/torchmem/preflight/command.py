"""The flags of `torchmem preflight`.

`torchmem preflight`: an unchanged training script on a phantom GPU; needs no extra but for `--plot`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmem.preflight.attempts import Runner

EPILOG = (
    "Exit code: 0 when it fits, 1 when it does not, 2 without a verdict: a flag or a script that cannot be tried, an "
    "error of the script's own."
)
DEFAULT_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.usage = "torchmem preflight --card CARD [options] -- COMMAND ..."
    parser.epilog = EPILOG
    parser.add_argument(
        "--card", metavar="CARD", help="one of --list-cards, or a size: 24GB (10^9), 22.5GiB (2^30)"
    )
    parser.add_argument(
        "--list-cards", action="store_true", help="show the cards that are known by name, and exit"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="cards that the script sees (default: one, or one a rank)",
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, metavar="N",
        help=f"stop after N optimizer steps (default {DEFAULT_STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--alloc-conf",
        metavar="CONF",
        help="PYTORCH_CUDA_ALLOC_CONF of the script (default: as in the environment)",
    )
    parser.add_argument(
        "--beside-gpu",
        action="store_true",
        help="go on although this machine has a real NVIDIA GPU",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, unchanged"
    )
    _add_distributed(parser.add_argument_group("one rank of many"))
    _add_searches(parser.add_argument_group("several runs, as a table"))
    _add_report(parser.add_argument_group("the report"))


def _add_distributed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--world-size", type=int, metavar="N", help="be one rank of N, with torchrun's environment"
    )
    group.add_argument("--rank", type=int, metavar="R", help="which rank (default 0)")
    group.add_argument(
        "--local-world-size",
        type=int,
        metavar="N",
        help="ranks on each node (default 8, or all if they are fewer)",
    )


def _add_searches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--find-batch", metavar="NAME=LO..HI",
        help="largest value of an option of the script that fits, as batch-size=1..64 for its --batch-size",
    )  # fmt: skip
    group.add_argument("--ranks", metavar="LIST", help="try these ranks of --world-size, as 0..3,7")
    group.add_argument(
        "--world-sizes", metavar="LIST", help="try --rank in worlds of these sizes, as 8,64,1024"
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--setting", metavar="CONF", action="append", default=[],
        help="compare this allocator setting instead of the usual ones; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--cards",
        metavar="LIST",
        help="compare these cards instead of the next larger and smaller ones",
    )
    group.add_argument(
        "--snapshot",
        metavar="FILE",
        type=Path,
        help="keep the trace, for memory_viz and torchmem whatif",
    )
    group.add_argument(
        "--json", action="store_true", help="one JSON document; the script's output goes to stderr"
    )
    group.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw memory over the steps, as .png or .svg"
    )


HELP = "run a training script on a phantom GPU and tell whether its memory fits a card"

__all__ = ["HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace, runner: Runner | None = None) -> int:
    """Try the command and return the exit code; raises UsageError.

    `runner`: what runs a plan, torchmem.preflight.run.run if not given.
    """
    from torchmem.preflight.answer import answer

    return answer(arguments, runner)
