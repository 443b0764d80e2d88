"""The log of NVML calls that return no value, or one that cannot be true.

Each call is logged once: those without a value in one line per reading.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import groupby

from torchmem.exporter.nvml_reasons import RETURN_CODES

_log = logging.getLogger(__name__)

Call = tuple[int, int, str, int | None]
"""Logging level, NVML's return code, name of the function, and index of the GPU if there is one."""


class MissingValues:
    """Collects the calls of several threads; `log` writes those that have not been logged yet."""

    def __init__(self) -> None:
        self._logged: set[Call] = set()
        self._new: set[Call] = set()
        self._impossible: dict[tuple[str, int | None], str | None] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    def set_gpu(self, index: int | None) -> None:
        """Say which GPU the next calls of this thread are for; None for the node as a whole."""
        self._thread.gpu = index

    def note(self, level: int, name: str, code: int) -> None:
        """Note that a call returned no value."""
        call = (level, code, name, getattr(self._thread, "gpu", None))
        with self._lock:
            if call not in self._logged:
                self._new.add(call)

    def note_impossible(self, name: str, text: str) -> None:
        """Note that a call returned a value that cannot be true; `text` is the value in words."""
        with self._lock:
            self._impossible.setdefault((name, getattr(self._thread, "gpu", None)), text)

    def log(self) -> None:
        """Log the new calls, one line per level, and each impossible value."""
        with self._lock:
            new, self._new = self._new, set()
            self._logged |= new
            impossible = {call: text for call, text in self._impossible.items() if text}
            self._impossible |= dict.fromkeys(impossible)
        for (name, gpu), text in impossible.items():
            where = _gpu_list(set() if gpu is None else {gpu})
            _log.warning(
                "NVML returns an impossible value%s, which is not used: %s: %s", where, name, text
            )
        for level, calls in groupby(sorted(new, key=lambda call: call[0]), lambda call: call[0]):
            _log.log(level, "NVML returns no value: %s", "; ".join(_groups(list(calls))))


def _groups(calls: Collection[Call]) -> Iterator[str]:
    """Yield the calls by return code and GPUs."""
    gpus: dict[tuple[int, str], set[int]] = defaultdict(set)
    for _, code, name, gpu in calls:
        gpus[code, name] |= set() if gpu is None else {gpu}
    names = defaultdict(list)
    for (code, name), indices in sorted(gpus.items()):
        names[code, _gpu_list(indices)].append(name)
    for (code, where), functions in names.items():
        words = RETURN_CODES.get(code, "unknown return code")
        yield f"{words} (code {code}){where}: {', '.join(functions)}"


def _gpu_list(indices: Collection[int]) -> str:
    """Return " on GPU 0" or " on GPUs 0-2, 5"; empty for calls that are not for one GPU."""
    if not indices:
        return ""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f" on GPU{'s' * (len(indices) > 1)} {ranges}"
