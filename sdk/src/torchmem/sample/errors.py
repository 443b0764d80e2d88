"""The errors torchmem raises on purpose.

TorchmemError           every error below
├── UsageError          a flag, setting or file is wrong; the command exits with code 2
└── MissingExtraError   the command needs an optional extra that is not installed; exit code 2
"""

from __future__ import annotations


class TorchmemError(Exception):
    """Base of all errors; its text is one sentence that says what to do next."""

    exit_code = 1


class UsageError(TorchmemError):
    """A flag, a setting or an input file that cannot be used as given."""

    exit_code = 2


class MissingExtraError(UsageError):
    """A part of torchmem whose dependencies are not installed."""

    def __init__(self, command: str, module: str, extra: str = "exporter") -> None:
        super().__init__(
            f"`torchmem {command}` needs the Python package {module!r}: run pip install 'torchmem[{extra}]'."
        )
