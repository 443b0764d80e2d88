"""The process that unpickles a snapshot: only builtins, bounded memory and time, no secrets.

It reads the file on stdin. On stdout it writes two lines of JSON, and then the arrays of the
events. The first line, `WorkerLimits`, says that it has started; the second is an error, or
everything but the events.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import resource
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchmem.sample.capture_messages import FACTS_KEY
from torchmem.trace.capture_facts import check_facts
from torchmem.trace.checked_values import HOW_TO_RECORD, InvalidSnapshotError
from torchmem.trace.content import Content, as_dict, check
from torchmem.trace.events import EventColumns
from torchmem.trace.open_traces import OpenTraces
from torchmem.trace.recording import CaptureFacts
from torchmem.trace.stacks import NO_STACK

# A trace needs 2 bytes for each byte of the file; segments, stacks of PyTorch 2.0 up to 10.
BASE_BYTES, BYTES_PER_BYTE = 512 << 20, 12
WINDOW_BYTES = 4 << 20
"""What is read of the file at once; the traces are read after each."""
# The worker reads about 30 MB per second; a slow or busy machine gets thirty times as long.
BASE_SECONDS, BYTES_PER_SECOND = 20, 1 << 20
OUT_OF_MEMORY = 12
"""Exit code of a worker that cannot get more memory: ENOMEM."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER_OVERCOMMIT = "2"


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What bounds a worker: True for the limit of a file of its size, which no snapshot reaches.

    False for a lower one, which says nothing about the file.
    """

    is_own_memory: bool
    is_own_time: bool


def main(*, stacks: bool = False) -> None:
    """Read the snapshot from stdin and answer on stdout; with `stacks` also the Python stacks."""
    size = os.fstat(0).st_size
    limits = _limit(size)
    gc.disable()  # it would traverse millions of dicts again and again
    sys.stdout.buffer.write(json.dumps(asdict(limits)).encode() + b"\n")
    sys.stdout.buffer.flush()
    try:
        _answer(size, stacks=stacks)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    os._exit(0)  # without freeing millions of objects one by one


def _limit(size: int) -> WorkerLimits:
    lower_limit(resource.RLIMIT_CORE, 0)
    memory = lower_limit(resource.RLIMIT_AS, BASE_BYTES + BYTES_PER_BYTE * size)
    time = lower_limit(resource.RLIMIT_CPU, BASE_SECONDS + size // BYTES_PER_SECOND)
    return WorkerLimits(memory and not _is_memory_strict(), time)


def _is_memory_strict() -> bool:
    """Return whether this machine refuses memory that other programs have reserved."""
    try:
        return _OVERCOMMIT.read_text().strip() == _NEVER_OVERCOMMIT
    except OSError:
        return False


def _answer(size: int, *, stacks: bool) -> None:
    header: dict[str, Any]
    arrays: list[array[int]] = []
    traces = OpenTraces()
    try:
        with io.BufferedReader(WatchedFile(0, traces.advance), WINDOW_BYTES) as file:
            snapshot = load(file)
        content = check(snapshot, size, needs_trace=not stacks, traces=traces)
        columns = {device: trace.columns for device, trace in content.traces.items()}
        lengths = {device: len(each.codes) for device, each in columns.items()}
        facts = check_facts(as_dict(snapshot).get(FACTS_KEY), lengths)
        header = _header(content, facts)
        arrays = [column for each in columns.values() for column in each.arrays()]
        if stacks:
            header["stacks"] = _stacks(content)
            for trace in content.traces.values():
                arrays.extend(trace.stacks.arrays())
            arrays.extend((content.table.members, content.table.lengths))
    except InvalidSnapshotError as error:
        header, arrays = {"error": str(error)}, []
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for column in arrays:
        column.tofile(sys.stdout.buffer)
    sys.stdout.buffer.flush()


class WatchedFile(io.FileIO):
    """A file that calls a function before it is read on."""

    def __init__(self, descriptor: int, on_read: Callable[[], None]) -> None:
        super().__init__(descriptor, closefd=False)
        self._on_read = on_read

    def readinto(self, buffer: Any, /) -> int | None:
        """Read the next bytes."""
        self._on_read()
        return super().readinto(buffer)


def _stacks(content: Content) -> dict[str, Any]:
    """Return the header's part about stacks."""
    table = content.table
    return {
        "frames": list(map(astuple, table.frames)),
        "members": len(table.members),
        "stacks": len(table.lengths),
        "texts": list(table.texts),
        "annotations": list(map(astuple, content.annotations)),
        "blocks": [
            [device, [pair for pair in segments.stacks.items() if pair[1] != NO_STACK]]
            for device, segments in content.segments.items()
        ],
    }


def load(file: BinaryIO) -> Any:
    """Unpickle a value that consists of builtins.

    Raises:
        InvalidSnapshotError: the file is not such a pickle.
        MemoryError: the value is too large.
    """
    _check_beginning(file)
    try:
        value: object = _BuiltinsUnpickler(file).load()
    except (InvalidSnapshotError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes can raise any exception
        # CPython raises EOFError("Ran out of input") or UnpicklingError("pickle data was
        # truncated").
        if isinstance(error, EOFError) or "truncated" in str(error):
            raise InvalidSnapshotError(
                "ends too early, so it was not written or copied completely: copy it again or "
                "record another one."
            ) from None
        raise _not_a_snapshot() from None
    return value


class _BuiltinsUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Reject every class and function, so that no code runs."""
        raise InvalidSnapshotError(
            f"refers to code ({module_name[:80]}.{global_name[:80]}), which no memory snapshot "
            "does: do not open it with other tools, and record a snapshot of your own."
        )


def _check_beginning(file: BinaryIO) -> None:
    beginning = file.read(2)
    file.seek(0)
    if not beginning:
        raise InvalidSnapshotError(f"is empty. To record a snapshot, {HOW_TO_RECORD}.")
    if beginning[:1] != b"\x80":  # every pickle since protocol 2 starts with this byte
        raise _not_a_snapshot()


def _not_a_snapshot() -> InvalidSnapshotError:
    return InvalidSnapshotError(
        f"is not a memory snapshot of PyTorch. To record one, {HOW_TO_RECORD}."
    )


def lower_limit(kind: int, limit: int) -> bool:
    """Lower a resource limit of this process; return False if it is lower already.

    The hard limit is one higher: at the soft limit of CPU time, the process gets SIGXCPU, and at
    the hard one SIGKILL, with which Linux also ends it when the machine runs out of memory.
    """
    _, hard = resource.getrlimit(kind)
    highest = limit + 1 if hard == resource.RLIM_INFINITY else min(limit + 1, hard)
    resource.setrlimit(kind, (min(limit, highest), highest))
    return limit <= highest


def _header(content: Content, facts: Mapping[int, CaptureFacts]) -> dict[str, Any]:
    return {
        "settings": content.settings,
        "segments": [
            [device, list(map(astuple, of_device.segments))]
            for device, of_device in content.segments.items()
        ],
        "traces": [
            _trace_header(device, trace.columns) | {"facts": _facts(facts.get(device))}
            for device, trace in content.traces.items()
        ],
    }


def _facts(facts: CaptureFacts | None) -> dict[str, Any]:
    """Return the fields of the facts; pairs replace mappings, because JSON has no integer keys."""
    if facts is None:
        return {}
    return asdict(facts) | {"block_sizes": list(facts.block_sizes.items())}


def _trace_header(device: int, columns: EventColumns) -> dict[str, Any]:
    return {
        "device": device,
        "events": len(columns.codes),
        "device_free": list(columns.device_free.items()),
        "pools": list(columns.pool_ids),
        "ignored": columns.ignored,
        "truncated": columns.truncated,
    }
