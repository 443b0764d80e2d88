"""The `torchmem` command. Each subcommand is a module of `torchmem.commands`.

Only the module of the given command is imported; the help text imports all of them. These modules
must not need an extra or be slow to import; their `run` imports what it needs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from torchmem.cli.parser import Parser, add_command, check_command
from torchmem.sample.errors import TorchmemError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
NO_MEMORY = "this machine has too little free memory: end other programs, or use a larger one."
COMMANDS = (
    "exporter",
    "run",
    "demo",
    "top",
    "why",
    "release",
    "capture",
    "whatif",
    "compare",
    "preflight",
    "mcp",
    "doctor",
    "fleet",
    "manifests",
)
EPILOG = """\
Examples:
  torchmem demo
  torchmem run -- python train.py

`torchmem COMMAND --help` shows the flags and examples of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code; print an expected error as one sentence."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        check_command(words, COMMANDS)
        given = [name for name in words[:1] if name in COMMANDS]
        parsed = command_line(given or COMMANDS).parse_args(words)
        return int(parsed.run(parsed))
    except TorchmemError as error:
        print(f"torchmem: {error}", file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print(f"torchmem: {NO_MEMORY}", file=sys.stderr)
        return TorchmemError.exit_code
    except KeyboardInterrupt:
        print("torchmem: interrupted.", file=sys.stderr)
        return INTERRUPTED


def command_line(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return a parser of the commands `names`; its result has the command's function as `run`."""
    parser = Parser(
        prog="torchmem",
        description="Prometheus monitoring for PyTorch GPU memory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda _: _help(parser))
    if names == COMMANDS:
        _add_version(parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in names:
        add_command(subparsers, name, importlib.import_module(f"torchmem.commands.{name}"))
    return parser


def _add_version(parser: argparse.ArgumentParser) -> None:
    from importlib.metadata import version

    parser.add_argument("--version", action="version", version=f"torchmem {version('torchmem')}")


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0
