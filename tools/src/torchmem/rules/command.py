"""`torchmem rules`: the recording and alerting rules for Prometheus, from a file of thresholds."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmem.sample.errors import MissingExtraError

HELP = "write Prometheus' recording and alerting rules from your thresholds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--thresholds", type=Path, metavar="FILE", help="your thresholds (default: as shipped)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write the rules, one file for each subject",
    )
    what.add_argument(
        "--check", type=Path, metavar="DIR", help="write nothing; fail if the rules there differ"
    )
    what.add_argument(
        "--defaults", action="store_true", help="print the shipped thresholds, to start a file from"
    )


def run(arguments: argparse.Namespace) -> int:
    """Render the rules and return the exit code; raises MissingExtraError and UsageError."""
    try:
        from torchmem.rules.render import run
    except ModuleNotFoundError as error:
        raise MissingExtraError("rules", error.name or "") from error
    return run(arguments)
