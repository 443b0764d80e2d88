"""`torchmem top`: the memory of a node in a terminal, as its exporter sees it.

Without an exporter on this machine, it shows the ranks of the run directory.
"""

from __future__ import annotations

import argparse

from torchmem.cli.flags import add_exporter
from torchmem.sample.errors import MissingExtraError
from torchmem.top.keys import KEY_COLUMNS, KEYS

HELP = "show the GPUs and ranks of a node in the terminal, live"
EPILOG = """\
Examples:
  torchmem top
  torchmem top --exporter http://node17:9847
  torchmem top --once

Without a terminal, it prints one screen like --once. Keys:
""" + "".join(f"  {' '.join(key.names):<{KEY_COLUMNS}}{key.does}\n" for key in KEYS)
DEFAULT_INTERVAL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add_exporter(parser, None)
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
