"""Snapshot files as recordings. The pickle is opened by a child process with bounded memory and time."""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
import subprocess
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import IO, Any

import torchmem
from torchmem.recording.recording import (
    DEFAULT_POOL,
    Event,
    PoolId,
    RecordedBlock,
    RecordedSegment,
    Recording,
)
from torchmem.recording.unpickle import ACTIONS, Columns
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.sample.untrusted import printable, sanitize_text

MAX_FILE_BYTES = 1 << 30
_ROOTS = [str(Path(folder).parent) for folder in torchmem.__path__]
_PROGRAM = (
    "import sys; sys.path[:0] = sys.argv[1:]; from torchmem.recording.unpickle import main; main()"
)


def read(path: Path) -> tuple[Recording, ...]:
    """The devices of a snapshot that have a trace with allocations, by index.

    Reads what `torch.cuda.memory._dump_snapshot` of PyTorch 2.1 and newer writes; nothing in the file is executed. A
    child process unpickles it, with at most 512 MiB and 12 bytes for each byte of the file, so neither a damaged nor a
    hostile file can take more. Raises UsageError, one sentence that says what is wrong and what to do.
    """
    name = sanitize_text(str(path))
    with _open(path, name) as descriptor, _worker(descriptor) as answer, _without_collector():
        header = _header(answer, name)
        return tuple(_recordings(header, answer, path.name))


@contextmanager
def _open(path: Path, name: str) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(
            f"{name} does not exist: name a file that torch.cuda.memory._dump_snapshot wrote."
        ) from None
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENXIO:
            raise UsageError(f"{name} is not a regular file: name a snapshot file.") from None
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{name} cannot be read ({reason}): name a file that you may read."
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise UsageError(f"{name} is {kind}: name a snapshot file.")
        if status.st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"{name} is larger than {MAX_FILE_BYTES >> 30} GiB: record fewer steps, or with "
                "_record_memory_history(max_entries=1_000_000)."
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _worker(descriptor: int) -> Iterator[IO[bytes]]:
    """The answer of a worker that reads `descriptor`; it sees no site-packages and no environment."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *_ROOTS]
    try:
        process = subprocess.Popen(
            command, stdin=descriptor, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
        )
    except OSError as error:
        raise TorchmemError(
            f"cannot start {sys.executable} to read snapshots ({error.strerror})."
        ) from error
    with process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            yield process.stdout
        finally:
            process.kill()


def _header(answer: IO[bytes], name: str) -> dict[str, Any]:
    line = answer.readline()
    if not line.endswith(b"\n"):
        raise UsageError(
            f"{name} needs more memory or time than any snapshot of its size: it is damaged or was made to do harm; "
            "record one of your own."
        )
    header: dict[str, Any] = json.loads(line)
    if "refused" in header:
        raise UsageError(f"{name} {printable(header['refused'])}")
    return header


def _recordings(header: dict[str, Any], answer: IO[bytes], name: str) -> Iterator[Recording]:
    rows = dict(header["segments"])
    for trace in header["traces"]:
        columns = Columns()
        for column in columns.arrays():
            _fill(column, answer, trace["events"], name)
        segments = tuple(map(_segment, rows.get(trace["device"], ())))
        yield Recording(
            name=name,
            device=trace["device"],
            segments=segments,
            events=_events(
                columns, dict(trace["device_free"]), list(map(tuple, trace["pools"])), segments
            ),
            settings=header["settings"],
            truncated=trace["truncated"],
            ignored=trace["ignored"],
        )


def _fill(column: array[int], answer: IO[bytes], number: int, name: str) -> None:
    data = answer.read(number * column.itemsize)
    if len(data) != number * column.itemsize:
        raise UsageError(
            f"{sanitize_text(name)} was not read to its end: try again on a machine with more free memory."
        )
    column.frombytes(data)


def _segment(row: list[Any]) -> RecordedSegment:
    address, total_size, stream, is_small, is_expandable, pool, blocks = row
    return RecordedSegment(
        address,
        total_size,
        stream,
        is_small,
        is_expandable,
        tuple(pool),
        tuple(RecordedBlock(*block) for block in blocks),
    )


def _events(
    columns: Columns,
    device_free: dict[int, int],
    pool_ids: Sequence[PoolId],
    segments: Sequence[RecordedSegment],
) -> tuple[Event, ...]:
    pools = [*pool_ids, DEFAULT_POOL]  # index -1 is the last
    actions = map(ACTIONS.__getitem__, columns.codes)
    if pool_ids:
        of_events: Iterator[PoolId] = map(pools.__getitem__, columns.pools)
    else:
        of_events = _pools_by_address(columns.addresses, segments)
    numbers = range(len(columns.codes))
    free = map(device_free.get, numbers) if device_free else repeat(None)
    return tuple(
        map(Event, actions, columns.addresses, columns.sizes, columns.streams, of_events, free)
    )


def _pools_by_address(
    addresses: array[int], segments: Sequence[RecordedSegment]
) -> Iterator[PoolId]:
    """Before 2.12 events do not tell their pool: it is that of the final segment at the address, if there is one."""
    if all(segment.pool == DEFAULT_POOL for segment in segments):
        return repeat(DEFAULT_POOL)
    starts = [segment.address for segment in segments]
    return (_pool_at(address, starts, segments) for address in addresses)


def _pool_at(address: int, starts: Sequence[int], segments: Sequence[RecordedSegment]) -> PoolId:
    found = bisect_right(starts, address) - 1
    if found < 0 or address >= segments[found].address + segments[found].total_size:
        return DEFAULT_POOL
    return segments[found].pool


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of small objects come into being at once: the garbage collector would walk them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
