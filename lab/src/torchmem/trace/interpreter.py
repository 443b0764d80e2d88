"""Starts Python processes for torchmem's own work, and says how one of them ended.

They are isolated, as by python -I, but start where this Python has started: -I would ignore
PYTHONHOME, without which a copied Python finds no standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchmem.sample.untrusted import sanitize_text

if TYPE_CHECKING:
    from typing_extensions import Self

# What an interpreter needs to start. Everything else may be a secret, or change what Python does.
_NEEDED = frozenset(
    {
        # The dynamic loader finds libpython, and the libraries of Python's modules, with these.
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "DYLD_FALLBACK_LIBRARY_PATH",
        "NIX_LD",
        "NIX_LD_LIBRARY_PATH",
        # An interpreter that is a shell script finds programs with it.
        "PATH",
    }
)
# Python finds its standard library with these; python -E and -I ignore them.
_HOMES = frozenset({"PYTHONHOME", "PYTHONPLATLIBDIR"})
# The current folder, which is first on the path of -c, may have a file with the name of a module.
_ISOLATE = "import sys; sys.path[:] = [*filter(None, sys.path)]; "
MAX_STDERR_BYTES = 64 << 10


def isolated(program: str, *arguments: str) -> list[str]:
    """Return the command that runs `program` without site-packages and the current folder.

    Its environment is `only_needed` or `without_python_variables`.
    """
    return [sys.executable, "-S", "-c", _ISOLATE + program, *arguments]


def only_needed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without which the interpreter may not start."""
    names = _NEEDED | _homes()
    return {name: value for name, value in environment.items() if name in names}


def without_python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what changes how Python works, such as PYTHONWARNINGS."""
    homes = _homes()
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("PYTHON") or name in homes
    }


def _homes() -> frozenset[str]:
    return frozenset() if sys.flags.ignore_environment else _HOMES


class ErrorOutput:
    """The stderr of a process. The process never waits for it; what exceeds 64 KiB is lost."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self.writer, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self.writer)

    def last_line(self) -> str:
        """Return the last line, at most 200 bytes and printable; "" if there is none."""
        try:
            data = os.read(self._reader, MAX_STDERR_BYTES)
        except BlockingIOError:
            return ""
        lines = data.decode("utf-8", "replace").strip().splitlines()
        return sanitize_text(lines[-1].strip()) if lines else ""


def ending(exit_code: int, last_line: str) -> str:
    """Return how a process ended: the last line of its stderr, its signal or its exit code."""
    if exit_code < 0:
        return f"killed by {signal_name(-exit_code)}"
    return last_line.rstrip(".") or f"exit code {exit_code}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
