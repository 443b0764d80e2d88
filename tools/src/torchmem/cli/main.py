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
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code; print a TorchmemError as one sentence."""
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
