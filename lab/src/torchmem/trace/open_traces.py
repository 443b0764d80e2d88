"""The traces of a snapshot that is still being unpickled.

Python's unpickler makes a whole snapshot before it returns, which takes up to 9 bytes for each byte
of the file. Its lists are known to the garbage collector from their first moment, so a trace is
read, and its entries are forgotten, while the unpickler appends to it.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

from torchmem.trace.checked_values import InvalidSnapshotError
from torchmem.trace.events import TraceReader, is_trace
from torchmem.trace.stacks import StackTable

MAX_EMPTY = 10_000
"""New lists that may become a trace. An unpickler appends a thousand entries at once."""


class OpenTraces:
    """Reads traces from their first entries on."""

    def __init__(self) -> None:
        self.table = StackTable()
        self._readers: dict[int, tuple[list[Any], TraceReader]] = {}
        self._empty: list[list[Any]] = []

    def reader(self, trace: list[Any]) -> TraceReader:
        """Return the reader of a trace, which may have read a part of it."""
        _, reader = self._readers.setdefault(id(trace), (trace, TraceReader(self.table)))
        return reader

    def advance(self) -> None:
        """Read the entries that have been appended since the last call.

        The collector must be disabled. What cannot be used is left for the end, when the device is
        known.
        """
        for trace in self._new_traces():
            self.reader(trace)
        for trace, reader in self._readers.values():
            with suppress(InvalidSnapshotError):
                reader.take(trace)

    def _new_traces(self) -> list[list[Any]]:
        """Return the traces among the lists made since the last call, and those empty until now."""
        lists = [each for each in gc.get_objects(generation=0) if type(each) is list]
        gc.freeze()  # the next call sees new objects only
        candidates = self._empty + lists
        self._empty = [each for each in candidates if not each][-MAX_EMPTY:]
        return [each for each in candidates if each and is_trace(each)]
