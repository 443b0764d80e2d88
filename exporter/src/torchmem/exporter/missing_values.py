"""The log of NVML calls that return no value, or one that cannot be true.

Each call is logged once: those without a value in one line per reading.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from itertools import groupby

from torchmem.exporter.nvml_reasons import RETURN_CODES

_log = logging.getLogger(__name__)

Call = tuple[int, int, str]
"""Logging level, NVML's return code, and the name of the function."""


class MissingValues:
    """Collects the calls of several threads; `log` writes those that have not been logged yet."""

    def __init__(self) -> None:
        self._logged: set[Call] = set()
        self._new: set[Call] = set()
        self._impossible: set[str] = set()
        self._lock = threading.Lock()

    def note(self, level: int, name: str, code: int) -> None:
        """Note that a call returned no value."""
        with self._lock:
            self._new.add((level, code, name))

    def note_impossible(self, name: str, text: str) -> None:
        """Log that a call returned a value that cannot be true; `text` is the value in words."""
        with self._lock:
            is_known = name in self._impossible
            self._impossible.add(name)
        if not is_known:
            _log.warning("NVML returns an impossible value, which is not used: %s: %s", name, text)

    def log(self) -> None:
        """Log the new calls, one line per level."""
        with self._lock:
            new, self._new = self._new - self._logged, set()
            self._logged |= new
        for level, calls in groupby(sorted(new), lambda call: call[0]):
            _log.log(level, "NVML returns no value: %s", "; ".join(_by_code(calls)))


def _by_code(calls: Iterable[Call]) -> Iterator[str]:
    """Yield the names of the functions by return code."""
    for code, group in groupby(calls, lambda call: call[1]):
        words = RETURN_CODES.get(code, "unknown return code")
        yield f"{words} (code {code}): {', '.join(name for _, _, name in group)}"
