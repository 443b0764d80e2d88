"""The `torchmem` command. Each subcommand is the module `command` of the room of its name.

These modules are imported to build the parser, so they must not need an extra or be slow to
import; `run` imports what it needs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from torchmem.sample.errors import TorchmemError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
COMMANDS = (
    "exporter",
    "run",
    "demo",
    "oom",
    "report",
    "capture",
    "whatif",
    "snapshot",
    "preflight",
    "doctor",
    "rules",
    "completion",
)
EPILOG = """\
Examples:
  torchmem demo
  torchmem run -- python train.py

`torchmem COMMAND --help` shows the flags and examples of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code; print a TorchmemError as one sentence."""
    try:
        parsed = command_line().parse_args(arguments)
        return int(parsed.run(parsed))
    except TorchmemError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("torchmem: interrupted.", file=sys.stderr)
        return INTERRUPTED


def command_line() -> argparse.ArgumentParser:
    """Return the parser; of what it returns, `run` is a function of the parsed arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="torchmem",
        description="Prometheus monitoring for PyTorch GPU memory.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    parser.set_defaults(run=lambda _: _help(parser))
    parser.add_argument("--version", action="version", version=f"torchmem {version('torchmem')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        command = importlib.import_module(f"torchmem.{name}.command")
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            epilog=command.EPILOG,
            formatter_class=raw,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0
