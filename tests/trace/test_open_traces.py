"""A trace is read while it is unpickled: the result is the same, and the entries are forgotten."""

from __future__ import annotations

import gc
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.recordings import RecordedJob, varying_lengths, write

from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import without_collector
from torchmem.sample.errors import UsageError
from torchmem.trace import StackedTrace, read_with_stacks
from torchmem.trace.content import check
from torchmem.trace.open_traces import OpenTraces
from torchmem.trace.worker import WINDOW_BYTES, WatchedFile, load

COPIES = 60
"""Repetitions of a trace, enough for the file to span several windows."""


@pytest.fixture(scope="module")
def snapshot() -> dict[str, Any]:
    """A snapshot of two devices with long traces, each entry with a stack of its own."""
    jobs = [varying_lengths(steps=40, seed=device) for device in range(2)]
    traces = [
        [{**entry, "frames": [*entry["frames"]]} for _ in range(COPIES) for entry in job.trace]
        for job in jobs
    ]
    return jobs[0].snapshot() | {"device_traces": traces}


@pytest.mark.parametrize("protocol", [2, 4])
def test_entries_are_forgotten_while_the_rest_is_unpickled(
    snapshot: dict[str, Any], tmp_path: Path, protocol: int
) -> None:
    """At the end most entries of both traces were read, and what was read is gone."""
    traces, path = OpenTraces(), write(snapshot, tmp_path / "job.pickle", protocol)
    lengths = [len(trace) for trace in snapshot["device_traces"]]
    with known_objects(), path.open("rb") as file:
        found = load(io.BufferedReader(WatchedFile(file.fileno(), traces.advance), 1 << 16))
    left = [sum(entry is not None for entry in trace) for trace in found["device_traces"]]

    assert all(count < 5000 < length for count, length in zip(left, lengths, strict=True))
    content = check(found, path.stat().st_size, traces=traces)
    assert lengths == [len(trace.columns.codes) for trace in content.traces.values()]


@contextmanager
def known_objects() -> Iterator[None]:
    """Hide all objects that exist from the collector, which a new process does not have."""
    with without_collector():
        gc.freeze()
        yield
        gc.unfreeze()


def columns(trace: StackedTrace) -> tuple[Any, ...]:
    """Return all that was read of a trace, with stacks and texts in place of numbers."""
    stacks = [tuple(trace.stacks.of(number)) for number in trace.events.numbers]
    return *trace.columns.arrays(), trace.events.times, stacks


def test_progress_is_told_while_a_file_is_read(snapshot: dict[str, Any], tmp_path: Path) -> None:
    """The bytes that were read so far grow, up to the size of the file."""
    traces = [[{**e} for e in trace * 4] for trace in snapshot["device_traces"]]
    path = write(snapshot | {"device_traces": traces}, tmp_path / "long.pickle")
    told: list[tuple[int, int]] = []
    read_with_stacks(path, lambda done, total: told.append((done, total)))
    size = path.stat().st_size
    assert {total for _, total in told} == {size}
    assert sorted(told) == told
    assert 0 < told[-1][0] <= size


def test_what_is_read_early_is_what_is_read_late(snapshot: dict[str, Any], tmp_path: Path) -> None:
    """A file of several windows, and files of one with parts of it, give the same events."""
    path = write(snapshot, tmp_path / "long.pickle")
    assert path.stat().st_size > WINDOW_BYTES
    whole = [columns(trace) for trace in read_with_stacks(path)]
    parts = snapshot["device_traces"]
    size = len(parts[0]) // COPIES
    short = snapshot | {"device_traces": [parts[0][:size], parts[1][: len(parts[1]) // COPIES]]}
    for long, once in zip(
        whole,
        map(columns, read_with_stacks(write(short, tmp_path / "short.pickle"))),
        strict=True,
    ):
        for column, part in zip(long, once, strict=True):
            assert list(column) == list(part) * COPIES


def test_a_stack_that_entries_and_blocks_share_is_known_to_all(tmp_path: Path) -> None:
    """A list of frames that was emptied for one entry still counts for the others."""
    job = RecordedJob()
    job.alloc(3 * MIB)
    shared = [{"filename": "/job/train.py", "line": 7, "name": "step"}]
    snapshot = job.snapshot()
    for entry in snapshot["device_traces"][0]:
        entry["frames"] = shared
    for block in snapshot["segments"][0]["blocks"]:
        block["frames"] = shared if block["state"] != "inactive" else []
    [trace] = read_with_stacks(write(snapshot, tmp_path / "shared.pickle"))
    numbers = {*trace.blocks.values(), trace.events.numbers[-1]}

    assert [[frame.line for frame in trace.stacks.of(number)] for number in numbers] == [[7]]


def test_an_entry_that_cannot_be_used_is_named_with_its_device(
    snapshot: dict[str, Any], tmp_path: Path
) -> None:
    """Although it was met while the number of the device was still unknown."""
    traces = [list(trace) for trace in snapshot["device_traces"]]
    traces[1][5000] = traces[1][5000] | {"size": -1}
    path = write(snapshot | {"device_traces": traces}, tmp_path / "damaged.pickle")

    with pytest.raises(UsageError, match=re.escape("event 5000 of device 1 has an invalid size")):
        read_with_stacks(path)


def test_an_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """PyTorch writes each entry once."""
    job = RecordedJob()
    job.alloc(3 * MIB)
    snapshot = job.snapshot()
    snapshot["device_traces"][0] *= 2
    with pytest.raises(UsageError, match="the same events many times"):
        read_with_stacks(write(snapshot, tmp_path / "twice.pickle"))
