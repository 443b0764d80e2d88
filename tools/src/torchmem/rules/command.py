"""`torchmem rules`: write Prometheus' recording and alerting rules for a file of thresholds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmem.sample.errors import MissingExtraError, UsageError

HELP = "write recording and alerting rules for Prometheus from your thresholds"
EPILOG = """\
Examples:
  torchmem rules --defaults > thresholds.yml
  torchmem rules --thresholds thresholds.yml --out rules
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--thresholds",
        type=Path,
        metavar="FILE",
        help="the file of your thresholds (default: the shipped thresholds)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the directory to write the rules to, one file for each subject",
    )
    action.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="write nothing; fail if the rules in the directory differ",
    )
    action.add_argument(
        "--defaults",
        action="store_true",
        help="print the shipped thresholds, as a template for your file",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the shipped thresholds, write the rules, or check them; return the exit code.

    Raises MissingExtraError and UsageError.
    """
    try:
        from torchmem.explain.thresholds import defaults_text
        from torchmem.exporter import thresholds
        from torchmem.rules import render
    except ModuleNotFoundError as error:
        raise MissingExtraError("rules", error.name or "") from error
    if arguments.defaults:
        sys.stdout.write(defaults_text())
        return 0
    rendered = render.render(thresholds.load(arguments.thresholds))
    if arguments.check:
        return _check(arguments.check, render.outdated(arguments.check, rendered))
    if arguments.out is None:
        raise UsageError("--out is missing: give the directory for the rules.")
    render.write(arguments.out, rendered)
    print(f"Wrote {len(rendered)} files to {arguments.out}.")
    print(f"Check them with: promtool check rules {arguments.out}/*.yml")
    return 0


def _check(folder: Path, outdated: list[str]) -> int:
    if not outdated:
        return 0
    print(
        f"torchmem: {folder} does not match the thresholds ({', '.join(outdated)}): run "
        f"`torchmem rules --out {folder}` with the same thresholds.",
        file=sys.stderr,
    )
    return 1
