"""Files that anybody may have written: what is not a healthy sample is refused, counted once, and harms nothing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import scrape
from support.publishing import own_process, own_sample, publish
from support.samples import samples

from torchmem.exporter.collect import Exporter
from torchmem.exporter.run_directory import (
    MAX_ENTRIES,
    MAX_FILES_PER_USER,
    REASONS,
    RejectedSampleError,
    RunDirectory,
    decode,
)
from torchmem.exporter.testing import FakeNvml
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX
from torchmem.sample.sample import Sample, encode
from torchmem.sample.untrusted import MAX_TEXT

OpenExporter = Callable[..., Exporter]
REJECTED = "torchmem_exporter_rejected_samples_total"
NAME = f"x{SAMPLE_SUFFIX}"


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    """A valid sample file with one value replaced."""
    content = json.loads(encode(own_sample()))
    target = content
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return json.dumps(content).encode()


def write(content: bytes) -> Callable[[Path], None]:
    """Something that puts a file with this content at a path."""

    def put(path: Path) -> None:
        path.write_bytes(content)

    return put


def link_to_sample(path: Path) -> None:
    """A symbolic link to a sample that would be valid."""
    target = path.with_name("target")
    target.write_bytes(encode(own_sample()))
    path.symlink_to(target)


def bind_socket(path: Path) -> None:
    """A Unix socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "symlink": (link_to_sample, "not_regular"),
    "dangling symlink": (lambda path: path.symlink_to("/nowhere"), "not_regular"),
    "FIFO": (os.mkfifo, "not_regular"),
    "socket": (bind_socket, "not_regular"),
    "directory": (lambda path: path.mkdir(), "not_regular"),
    "huge": (write(b" " * (MAX_SAMPLE_BYTES + 1)), "too_large"),
    "empty": (write(b""), "malformed"),
    "truncated": (write(encode(own_sample())[:-40]), "malformed"),
    "invalid UTF-8": (write(b'{"schema": 1, "x": "\xff\xfe"}'), "malformed"),
    "nested a thousandfold": (write(b"[" * 100_000), "malformed"),
    "JSON of another kind": (write(b"[1, 2]"), "malformed"),
    "NaN": (
        write(encode(own_sample()).replace(b'"cpu_seconds":0.25', b'"cpu_seconds":NaN')),
        "malformed",
    ),
    "infinite": (
        write(encode(own_sample()).replace(b'"cpu_seconds":0.25', b'"cpu_seconds":1e999')),
        "malformed",
    ),
    "newer schema": (write(changed(("schema",), 2)), "unknown_schema"),
    "number as text": (write(changed(("process", "rank"), "0")), "malformed"),
    "unknown ending": (write(changed(("ended",), "paused")), "malformed"),
    "negative bytes": (
        write(changed(("devices", 0, "allocator", "reserved_bytes", "large"), -1)),
        "out_of_bounds",
    ),
    "number beyond 64 bits": (write(changed(("timestamp",), 10**400)), "out_of_bounds"),
    "pid zero": (write(changed(("process", "pid"), 0)), "out_of_bounds"),
    "pid beyond Linux": (write(changed(("process", "pid"), 1 << 40)), "out_of_bounds"),
    "short histogram": (write(changed(("steps", "duration_counts"), [1, 2])), "out_of_bounds"),
    "short block histogram": (
        write(changed(("devices", 0, "layout", "free_block_counts"), [1])),
        "out_of_bounds",
    ),
    "free block beyond free bytes": (
        write(changed(("devices", 0, "layout", "largest_free_block_bytes"), 1 << 60)),
        "out_of_bounds",
    ),
    "a thousand labels": (
        write(changed(("process", "labels"), {str(n): "x" for n in range(1000)})),
        "out_of_bounds",
    ),
    "a hundred devices": (
        write(changed(("devices",), [{"index": n} for n in range(100)])),
        "out_of_bounds",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_refused_and_counted_once(
    open_exporter: OpenExporter, run_dir: Path, kind: str
) -> None:
    """Beside any hostile file a healthy rank is still served, and the refusal is counted once, by its reason."""
    put, reason = HOSTILE[kind]
    publish(run_dir, own_sample())
    put(run_dir / NAME)
    exporter = open_exporter()

    for _ in range(3):
        shown = scrape(exporter)

    assert dict.fromkeys(REASONS, 0.0) | {reason: 1.0} == shown.by("reason", REJECTED)
    assert 1.0 == shown.value("torchmem_process_state", rank="0", state="running")


def test_every_reason_starts_at_zero(open_exporter: OpenExporter) -> None:
    """`increase()` sees the first refusal because its counter is there from the start."""
    assert dict.fromkeys(REASONS, 0.0) == scrape(open_exporter()).by("reason", REJECTED)


def test_new_version_of_a_hostile_file_counts_again(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """Counting follows file versions, so a process that keeps writing rubbish is seen to do so."""
    exporter = open_exporter()
    for content in (b"rubbish", b"other rubbish"):
        publish(run_dir, content)
        shown = scrape(exporter)

    assert 2.0 == shown.value(REJECTED, reason="malformed")


def test_repaired_file_is_served(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A refusal lasts only as long as the file stays as it is."""
    exporter = open_exporter()
    publish(run_dir, b"rubbish", NAME)
    scrape(exporter)
    publish(run_dir, own_sample(), NAME)

    assert 1.0 == scrape(exporter).value("torchmem_process_state", state="running")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")
def test_file_of_another_user_is_refused(open_exporter: OpenExporter, run_dir: Path) -> None:
    """Nobody can speak for the living process of another user."""
    os.chown(publish(run_dir, own_sample()), 12345, 12345)

    shown = scrape(open_exporter())

    assert 1.0 == shown.value(REJECTED, reason="foreign_owner")
    assert {} == shown.matching("torchmem_process_state")


def test_one_user_cannot_publish_without_end(run_dir: Path) -> None:
    """Of too many files the newest are shown, the others counted."""
    for rank in range(MAX_FILES_PER_USER + 3):
        publish(run_dir, own_sample(process=own_process(rank=rank)), f"{rank}{SAMPLE_SUFFIX}")
    directory = RunDirectory(run_dir)

    assert MAX_FILES_PER_USER == len(directory.read(now=0.0))
    assert 3 == directory.rejections["too_many"]
    assert MAX_ENTRIES > MAX_FILES_PER_USER


def test_two_files_with_the_same_identity_give_one_process(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """Series are never served twice; the newest file wins."""
    for name, steps in (("a", 10), ("b", 11)):
        sample = own_sample()
        publish(
            run_dir, replace(sample, steps=replace(sample.steps, count=steps)), name + SAMPLE_SUFFIX
        )

    shown = scrape(open_exporter())

    assert 11.0 == shown.value("torchmem_steps_total", rank="0")
    assert 1.0 == shown.value(REJECTED, reason="duplicate")


def test_devices_that_cannot_be_told_apart_are_not_served_twice(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """On a torch that gives no UUIDs a process with several devices still gives a valid exposition."""
    device = replace(own_sample().devices[0], uuid=None)
    publish(run_dir, own_sample(devices=(device, replace(device, index=1))))

    assert 1 == len(scrape(open_exporter()).matching("torchmem_reserved_bytes", pool="large"))


def test_text_is_cut_and_made_harmless() -> None:
    """Control characters cannot reach a terminal or a log through a label."""
    decoded = decode(encode(own_sample(process=own_process(run="a\n\x1b[31m\x00b" + "c" * 1000))))

    assert "a�" + "�[31m�b" == decoded.process.run[:9]
    assert MAX_TEXT == len(decoded.process.run)


@given(samples)
def test_every_sample_that_can_be_written_can_be_read(sample: Any) -> None:
    """Distrust refuses nothing that the SDK can publish; only text may come back cleaned."""
    decoded = decode(encode(sample))

    assert (
        sample.devices[0].allocator == decoded.devices[0].allocator
        if sample.devices
        else not decoded.devices
    )
    assert (sample.timestamp, sample.steps, sample.ended) == (
        decoded.timestamp,
        decoded.steps,
        decoded.ended,
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(content=st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_decoded_or_refused(content: bytes) -> None:
    """No content raises anything but the typed refusal."""
    with suppress(RejectedSampleError):
        assert isinstance(decode(content), Sample)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a JSON document."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [found for key, item in items for found in ((*path, key), *paths_of(item, (*path, key)))]


PATHS = paths_of(json.loads(encode(own_sample())))


@given(path=st.sampled_from(PATHS), value=json_values)
def test_any_value_in_place_of_any_other_leaves_the_exposition_valid(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[Any, ...], value: Any
) -> None:
    """Whatever stands in a sample file, the scrape parses, has no series twice and still knows itself."""
    directory = tmp_path_factory.mktemp("hostile")
    publish(directory, changed(path, value))
    publish(directory, own_sample(process=own_process(rank=7)), NAME)
    exporter = Exporter(FakeNvml.of(), RunDirectory(directory))

    shown = scrape(exporter)

    assert 1.0 == shown.value("torchmem_exporter_collector_success", collector="samples")
    assert 1.0 == shown.value("torchmem_process_state", rank="7", state="running")
