"""Errors that torchmem raises on purpose, for misuse and for input it cannot use.

TorchmemError           base of the errors below; the command exits with code 1
├── UsageError          a flag, setting or file is wrong; the command exits with code 2
├── WorkerError         a process of torchmem's own has failed, not the input; exit code 2
└── MissingExtraError   the command needs an optional extra that is not installed; exit code 2
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class TorchmemError(Exception):
    """Base of all errors; its text is one sentence that says what to do next."""

    exit_code = 1


class UsageError(TorchmemError):
    """A flag, a setting or an input file cannot be used as given."""

    exit_code = 2


class WorkerError(UsageError):
    """A process that does a part of torchmem's work has failed; the input is not to blame."""


class MissingExtraError(UsageError):
    """The dependencies of a part of torchmem are not installed."""

    def __init__(self, command: str, module: str, extra: str = "exporter") -> None:
        super().__init__(
            f"`torchmem {command}` needs the Python package {module!r}: "
            f"run pip install 'torchmem[{extra}]'."
        )


def did_you_mean(word: str, choices: Iterable[str], otherwise: str) -> str:
    """Return "did you mean 'NAME'?" for the choice closest to `word`, or `otherwise` if none is."""
    from difflib import get_close_matches  # only after a mistake: it takes half a megabyte

    close = get_close_matches(word, list(choices), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def program_advice(word: str) -> str:
    """Return what to do if `word`, the first of a command, is not a program that can be run."""
    if word.endswith(".py"):
        return f"start it with Python, as in -- python {word}."
    if Path(word).is_file():
        return f"make it executable (chmod +x {word}), or name its interpreter before it."
    return "check its name, or give a command such as -- python train.py."
