"""Reads a snapshot file as recordings; a bounded child process (`worker`) unpickles it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any

from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId, without_collector
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import HEAD_BYTES, SNAPSHOT, check_kind
from torchmem.sample.untrusted import (
    FileProblem,
    UntrustedFileError,
    open_untrusted,
    sanitize_text,
)
from torchmem.trace.annotations import Annotation
from torchmem.trace.events import ACTIONS, EventColumns
from torchmem.trace.recording import (
    CaptureFacts,
    Event,
    RecordedBlock,
    RecordedSegment,
    Recording,
    SegmentPools,
)
from torchmem.trace.stacks import EventStacks, SnapshotFrame, Stacks
from torchmem.trace.worker_process import started

MAX_FILE_BYTES = 16 << 30
MAX_REPLAYED_EVENTS = 10_000_000
MAX_PLACES = 1024
"""Combinations of device, stream and pool. A replay takes about 3 ms for each; jobs have dozens."""
_ADVICE: dict[FileProblem, str] = {
    "not_regular": "name a file of torch.cuda.memory._dump_snapshot or `torchmem capture`.",
    "unreadable": "name a file that you may read.",
    "no_descriptors": "raise the limit with ulimit -n.",
    "too_large": "record fewer steps, or with _record_memory_history(max_entries=1_000_000).",
}


@dataclass(frozen=True, slots=True)
class StackedTrace:
    """One device of a snapshot: segments, events by column, and stacks.

    Attributes:
        columns: the events.
        events: stack and time of each event, and what was written on it.
        blocks: the stack of a block in use by its address.
        texts: the names of annotations, metadata and compiled regions, by their numbers.
        annotations: starts and ends of the program's ranges.
        settings: as in `Recording`.
    """

    name: str
    device: int
    segments: tuple[RecordedSegment, ...]
    columns: EventColumns
    events: EventStacks
    blocks: Mapping[int, int]
    stacks: Stacks
    texts: Sequence[str] = ()
    annotations: Sequence[Annotation] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    facts: CaptureFacts = field(default_factory=CaptureFacts)

    def recording(self, since: int = 0) -> Recording:
        """Return what a replay needs, with the events from the number `since` on."""
        return Recording(
            name=self.name,
            device=self.device,
            segments=self.segments,
            events=_events(self.columns, self.segments, since),
            settings=self.settings,
            truncated=self.columns.truncated,
            ignored=self.columns.ignored,
            facts=self.facts,
        )


def read(path: Path) -> tuple[Recording, ...]:
    """Return a recording for each device of a snapshot that has a trace with allocations.

    Reads the files of `torch.cuda.memory._dump_snapshot`, PyTorch 2.0 and newer. Nothing in the
    file is executed: a child process unpickles it, with at most 512 MiB plus 12 bytes for each byte
    of the file, so neither a damaged nor a malicious file can use more.

    Raises:
        UsageError: the file cannot be used; the text explains why and what to do.
        WorkerError: the process that unpickles it has failed.
    """
    name = sanitize_text(str(path))
    with _open(path, name) as file, started(file, name) as worker, without_collector():
        return tuple(_recordings(worker.header(), worker.answer, path.name))


def read_with_stacks(
    path: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[StackedTrace, ...]:
    """Return every device of a snapshot that has memory or a trace, with the recorded stacks.

    Reads the same files as `read`, and the list of `torch.cuda.memory_snapshot()`. `progress` is
    called with the bytes of the file that have been read, and all of them.

    Raises:
        UsageError: the file cannot be used; the text explains why and what to do.
        WorkerError: the process that unpickles it has failed.
    """
    name = sanitize_text(str(path))
    with (
        _open(path, name) as file,
        started(file, name, "stacks=True") as worker,
        without_collector(),
    ):
        size = os.fstat(file).st_size
        # The worker's stdin is this open file, so both share one offset.
        header = worker.header(lambda: progress(os.lseek(file, 0, os.SEEK_CUR), size))
        return tuple(_stacked_traces(header, worker.answer, path.name))


def _stacked_traces(header: dict[str, Any], answer: IO[bytes], name: str) -> Iterator[StackedTrace]:
    columns = {trace["device"]: _columns(trace, answer, name) for trace in header["traces"]}
    facts = {trace["device"]: _facts(trace["facts"]) for trace in header["traces"]}
    events = {device: EventStacks() for device in columns}
    for device, stacks in events.items():
        _fill_all(stacks.arrays(), answer, len(columns[device].codes), name)
    shared = header["stacks"]
    table = _table(shared, answer, name)
    annotations = [Annotation(*row) for row in shared["annotations"]]
    rows, blocks = dict(header["segments"]), dict(shared["blocks"])
    for device in sorted({*rows, *columns}):
        yield StackedTrace(
            name=name,
            device=device,
            segments=tuple(map(_segment, rows.get(device, ()))),
            columns=columns.get(device, EventColumns()),
            events=events.get(device, EventStacks()),
            blocks=dict(blocks.get(device, ())),
            stacks=table,
            texts=shared["texts"],
            annotations=[each for each in annotations if each.device == device],
            settings=header["settings"],
            facts=facts.get(device, CaptureFacts()),
        )


def _columns(trace: dict[str, Any], answer: IO[bytes], name: str) -> EventColumns:
    """Return the events of the next trace of the answer."""
    columns = EventColumns()
    _fill_all(columns.arrays(), answer, trace["events"], name)
    columns.device_free = dict(trace["device_free"])
    columns.pool_ids = {(pool[0], pool[1]): number for number, pool in enumerate(trace["pools"])}
    return columns


def _table(facts: dict[str, Any], answer: IO[bytes], name: str) -> Stacks:
    members, lengths = array("i"), array("i")
    _fill(members, answer, facts["members"], name)
    _fill(lengths, answer, facts["stacks"], name)
    remaining = iter(members)
    stacks = [tuple(islice(remaining, length)) for length in lengths]
    return Stacks([SnapshotFrame(*frame) for frame in facts["frames"]], stacks)


def _fill_all(columns: Iterable[array[int]], answer: IO[bytes], count: int, name: str) -> None:
    for column in columns:
        _fill(column, answer, count, name)


@contextmanager
def _open(path: Path, name: str) -> Iterator[int]:
    """Open a snapshot, following links, and yield its file descriptor."""
    with ExitStack() as stack:
        try:
            real_path = os.path.realpath(path)
            file, _ = stack.enter_context(open_untrusted(real_path, MAX_FILE_BYTES))
        except FileNotFoundError:
            raise UsageError(
                f"{name} does not exist: name a file of torch.cuda.memory._dump_snapshot."
            ) from None
        except UntrustedFileError as error:
            too_large = f"is larger than {MAX_FILE_BYTES >> 30} GiB"
            problem = too_large if error.problem == "too_large" else str(error)
            raise UsageError(f"{name} {problem}: {_ADVICE[error.problem]}") from None
        except ValueError as error:  # the path has a null byte
            raise UsageError(f"{name} cannot be read ({error}): name a snapshot file.") from None
        check_kind(path, os.pread(file.fileno(), HEAD_BYTES, 0), SNAPSHOT, "a memory snapshot")
        yield file.fileno()


def _recordings(header: dict[str, Any], answer: IO[bytes], name: str) -> Iterator[Recording]:
    rows = dict(header["segments"])
    places: set[tuple[int, int, PoolId]] = set()
    for trace in header["traces"]:
        columns = _columns(trace, answer, name)
        segments = tuple(map(_segment, rows.get(trace["device"], ())))
        if len(columns.codes) > MAX_REPLAYED_EVENTS:
            raise UsageError(
                f"{sanitize_text(name)} has more than {MAX_REPLAYED_EVENTS:,} events, which is the "
                "limit of a replay: record fewer steps."
            )
        events = _events(columns, segments)
        places.update((trace["device"], item.stream, item.pool) for item in segments)
        places.update((trace["device"], item.stream, item.pool) for item in events)
        if len(places) > MAX_PLACES:
            raise UsageError(
                f"{sanitize_text(name)} uses more than {MAX_PLACES:,} combinations of device, "
                "stream and private pool, which is the limit: record fewer steps, or a job that "
                "reuses its streams."
            )
        yield Recording(
            name=name,
            device=trace["device"],
            segments=segments,
            events=events,
            settings=header["settings"],
            truncated=trace["truncated"],
            ignored=trace["ignored"],
            facts=_facts(trace["facts"]),
        )


def _facts(fields: Mapping[str, Any]) -> CaptureFacts:
    sizes = dict(fields.get("block_sizes", ()))
    return CaptureFacts(**{**fields, "block_sizes": sizes})


def _fill(column: array[int], answer: IO[bytes], count: int, name: str) -> None:
    data = answer.read(count * column.itemsize)
    if len(data) != count * column.itemsize:
        raise UsageError(
            f"{sanitize_text(name)} was not read completely: try again on a machine with more free "
            "memory."
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
    columns: EventColumns, segments: Sequence[RecordedSegment], since: int = 0
) -> tuple[Event, ...]:
    """Return the events. PyTorch before 2.12 records no pool: it is that of the final segment."""
    pools: Iterator[PoolId]
    if columns.pool_ids:
        pool_by_index = [*columns.pool_ids, DEFAULT_POOL]  # the index -1 is the last element
        pools = map(pool_by_index.__getitem__, columns.pools[since:])
    elif all(segment.pool == DEFAULT_POOL for segment in segments):
        pools = repeat(DEFAULT_POOL)
    else:
        pools = map(SegmentPools(segments).at, columns.addresses[since:])
    actions = map(ACTIONS.__getitem__, columns.codes[since:])
    free = columns.device_free
    device_free = map(free.get, range(since, len(columns.codes))) if free else repeat(None)
    places = (each[since:] for each in (columns.addresses, columns.sizes, columns.streams))
    return tuple(map(Event, actions, *places, pools, device_free))
