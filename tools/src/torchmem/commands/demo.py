"""`torchmem demo`: a scenario on simulated GPUs, through the real SDK and exporter."""

from __future__ import annotations

import argparse

from torchmem.sample.errors import MissingExtraError

HELP = "run a simulated training job and show the memory of its ranks; needs no GPU"
EPILOG = """\
Examples:
  torchmem demo --list
  torchmem demo --scenario leak --ranks 2 --loop
"""
DEFAULT_SCENARIO = "fragmentation"
DEFAULT_DURATION_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--scenario", default=DEFAULT_SCENARIO, metavar="NAME", help="scenario to run; see --list")
    add("--list", action="store_true", help="describe the scenarios and exit")
    add(
        "--ranks",
        type=int,
        default=4,
        metavar="N",
        help="number of ranks, each on a simulated GPU (default 4)",
    )
    add(
        "--duration",
        type=float,
        default=DEFAULT_DURATION_SECONDS,
        metavar="SECONDS",
        help="length of the scenario (default 300)",
    )
    add("--loop", action="store_true", help="repeat the scenario until Ctrl-C")
    add("--seed", type=int, default=0, metavar="N", help="seed of the allocations (default 0)")
    add(
        "--listen",
        default="127.0.0.1:9847",
        metavar="HOST:PORT",
        help="address of the exporter; a free port is used instead of 0 or of one in use",
    )
    add("--by-make", action="store_true", help=argparse.SUPPRESS)  # for the texts of messages


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code. Raise MissingExtraError or UsageError."""
    try:
        from torchmem.demo.session import run
    except ModuleNotFoundError as error:
        raise MissingExtraError("demo", error.name or "") from error
    return run(arguments)
