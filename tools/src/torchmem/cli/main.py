"""The `torchmem` command: one file for each subcommand; parts that need an extra are imported when they run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from torchmem.sample.errors import TorchmemError

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count
COMMANDS = ("exporter", "demo", "oom", "capture", "whatif", "preflight", "rules")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code. A mistake of the user's is one sentence on stderr and code 2."""
    try:
        parsed = _parser().parse_args(arguments)
        return int(parsed.run(parsed))
    except TorchmemError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("torchmem: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchmem", description="Prometheus monitoring for PyTorch GPU memory."
    )
    parser.add_argument("--version", action="version", version=f"torchmem {version('torchmem')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = importlib.import_module(f"torchmem.{name}.command")
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser
