"""A parser whose errors show the usage of the command, and name what was probably meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchmem.sample.errors import UsageError, did_you_mean
from torchmem.sample.file_kinds import check_file
from torchmem.sample.untrusted import sanitize_text

ELSEWHERE = {
    "phantom": "run `python -m torchmem.phantom`.",
    "sdk": "call sdk.instrument() in the script, or run `torchmem run -- COMMAND`.",
    "help": "run `torchmem --help`.",
    "version": "run `torchmem --version`.",
    **{kind: f"run `torchmem manifests {kind}`." for kind in ("rules", "dashboards", "completion")},
}
"""What to do for words that look like a command but are none."""


class Parser(argparse.ArgumentParser):
    """Like `argparse.ArgumentParser`, but each command checks its own flags."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments; print the usage and exit with 2 if some are unknown.

        Raise UsageError if the unknown one is a file of another command.
        """
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        self._exit(f"{message}; see `{self.prog} --help`.")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        name = sanitize_text(word.partition("=")[0])
        see = f"see `{self.prog} --help`."
        if not word.startswith("-"):
            check_file(Path(word), None, f"an argument of `{self.prog}`")
            is_exporter = "://" in word and "--exporter" in self._flags()
            hint = "give an exporter with --exporter URL." if is_exporter else see
            self._exit(f"unexpected argument {sanitize_text(word)!r}: {hint}")
        self._exit(f"unknown flag {name}: {did_you_mean(name, self._flags(), see)}")

    def _flags(self) -> Iterable[str]:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return {flag for action in shown for flag in action.option_strings} - {"-h", "--help"}

    def _exit(self, sentence: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UsageError.exit_code, f"torchmem: {sentence}\n")


def add_command(commands: Any, name: str, module: Any) -> None:
    """Add a command with the flags of its module, whose `run` the result has as `run`.

    `commands`: what `add_subparsers` returns.
    """
    parser = commands.add_parser(
        name,
        help=module.HELP,
        description=module.HELP,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def check_command(words: Sequence[str], commands: Sequence[str]) -> None:
    """Raise UsageError if the first word is not a command, but a misspelt one or a file."""
    word = next(iter(words), "-")
    if word.startswith("-") or word in commands:
        return
    check_file(Path(word), None, "a command")
    otherwise = ELSEWHERE.get(word) or "`torchmem --help` lists the commands."
    choices = () if word in ELSEWHERE else commands
    raise UsageError(
        f"there is no command {sanitize_text(word)!r}: {did_you_mean(word, choices, otherwise)}"
    )
