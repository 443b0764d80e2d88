"""`torchmem top`: the memory of a node in a terminal, as its exporter sees it."""

from __future__ import annotations

import argparse

from torchmem.sample.errors import MissingExtraError

HELP = "show the GPUs and ranks of a node in the terminal, live"
EPILOG = """\
Examples:
  torchmem top
  torchmem top --once http://127.0.0.1:9847

Keys: arrows or j and k select a rank, s changes the order, / filters by run,
q ends. Without a terminal, it prints one screen like --once.
"""
DEFAULT_URL = "http://127.0.0.1:9847"
DEFAULT_INTERVAL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    address = "address of the exporter, also with USER:PASSWORD@ before the host"
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"{address} ({DEFAULT_URL})")
    add("--once", action="store_true", help="print one screen and exit")
    add(
        "--interval",
        type=float,
        default=DEFAULT_INTERVAL_SECONDS,
        metavar="SECONDS",
        help="time between updates (default 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the node until the user ends it, and return the exit code.

    Raises MissingExtraError, UsageError, or with --once TorchmemError without an answer.
    """
    try:
        from torchmem.top.loop import run
    except ModuleNotFoundError as error:
        raise MissingExtraError("top", error.name or "") from error
    return run(arguments)
