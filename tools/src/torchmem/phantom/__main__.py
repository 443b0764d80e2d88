"""Run a command on phantom GPUs: `python -m torchmem.phantom --card h100-80gb -- python examples/gpt.py`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchmem.phantom.cards import MAX_CARDS, Card, card, memory_size
from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.torch_build import TorchBuild, interpreter, torch_of, usable
from torchmem.sample.errors import UsageError


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
            f"cannot run {command[0]!r}: name a program"
            if command
            else "no command: name one after --"
        )
    shown = _card(arguments.card, arguments.memory, os.environ)
    devices, torch = _device_number(arguments.devices), _torch(command, os.environ)
    environment = phantom_environment(shown, devices, Path(arguments.state), os.environ, torch)
    os.execvpe(command[0], command, environment)  # noqa: S606 (no shell is wanted)


def _card(name: str | None, memory: str | None, environment: Mapping[str, str]) -> Card:
    """What the flags say, otherwise the card of the run around this one."""
    if name is None and memory is None:
        name, memory = environment.get("PHANTOM_CARD"), environment.get("PHANTOM_MEMORY")
    if name is None:
        return card(memory or "h100-80gb")
    return replace(card(name), memory_bytes=memory_size(memory)) if memory else card(name)


def _torch(command: Sequence[str], environment: Mapping[str, str]) -> TorchBuild | None:
    """The PyTorch that the command will use. A command without one is welcome: an exporter needs only NVML."""
    python = interpreter(command, environment)
    build = torch_of(python, environment) if python else None
    return usable(build, python) if python and build else None


def _device_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CARDS:
        raise UsageError(f"{text!r} is not a number of cards from 1 to {MAX_CARDS}")
    return int(text)


def _parser() -> Parser:
    """The command line. Its defaults come from the environment, so that nested runs share their card."""
    parser = Parser(
        prog="python -m torchmem.phantom", description=__doc__,
        usage="%(prog)s [--card h100-80gb] [--memory 80GB] [--devices 1] [--state DIR] -- COMMAND ...",
    )  # fmt: skip
    parser.add_argument(
        "--card", help="name from the catalogue, or a size such as 24GB (default: h100-80gb)"
    )
    parser.add_argument(
        "--memory",
        help="memory of each card; GB is 10^9 bytes, GiB is 2^30 (default: the card's own)",
    )
    parser.add_argument(
        "--devices",
        default=os.environ.get("PHANTOM_DEVICES", "1"),
        help="number of cards (default: PHANTOM_DEVICES or 1)",
    )
    parser.add_argument(
        "--state",
        default=os.environ.get("PHANTOM_STATE_DIR", f"/tmp/phantom-{os.getuid()}"),  # noqa: S108 (as unsupported.c)
        help="folder through which processes share the cards (default: PHANTOM_STATE_DIR or %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run, after --")
    return parser


if __name__ == "__main__":
    main()
