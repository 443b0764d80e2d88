"""Run a command on the phantom GPU: `python -m torchmem.phantom --memory 9GB -- python examples/gpt.py`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from torchmem.core.errors import UsageError
from torchmem.phantom.cards import MAX_CARDS, card
from torchmem.phantom.environment import phantom_environment


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a pointer to --help."""
        raise UsageError(f"{message}: see {self.prog} --help")


def main() -> NoReturn:
    """Build when needed, set the environment, and become the command; a mistake is one sentence and exit code 2."""
    try:
        _become_the_command()
    except UsageError as error:
        sys.stderr.write(f"phantom: {error}\n")
        raise SystemExit(2) from None


def _become_the_command() -> NoReturn:
    arguments = _parser().parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command or not shutil.which(command[0]):
        raise UsageError(
            f"cannot run {command[0]!r}: name a program" if command else "no command: name one after --"
        )
    devices = _device_number(arguments.devices)
    environment = phantom_environment(card(arguments.memory), devices, Path(arguments.state), os.environ)
    os.execvpe(command[0], command, environment)  # noqa: S606 (no shell is wanted)


def _device_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CARDS:
        raise UsageError(f"{text!r} is not a number of cards from 1 to {MAX_CARDS}")
    return int(text)


def _parser() -> Parser:
    """The command line. Its defaults come from the environment, so that nested runs share their card."""
    parser = Parser(
        prog="python -m torchmem.phantom", usage="%(prog)s [--memory 80GB] [--devices 1] [--state DIR] -- COMMAND ...",
        description=__doc__,
    )  # fmt: skip
    parser.add_argument(
        "--memory",
        default=os.environ.get("PHANTOM_MEMORY", "80GB"),
        help="memory of each card; GB is 10^9 bytes, GiB is 2^30 (default: PHANTOM_MEMORY or 80GB)",
    )
    parser.add_argument(
        "--devices",
        default=os.environ.get("PHANTOM_DEVICES", "1"),
        help="number of cards (default: PHANTOM_DEVICES or 1)",
    )
    parser.add_argument(
        "--state",
        default=os.environ.get("PHANTOM_STATE_DIR", f"/tmp/phantom-{os.getuid()}"),  # noqa: S108 (as processes.c)
        help="folder through which processes share the cards (default: PHANTOM_STATE_DIR or %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run, after --")
    return parser


if __name__ == "__main__":
    main()
