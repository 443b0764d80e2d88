"""Files of the run directory that any user may have written: invalid ones are rejected."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
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


def sample_with(path: tuple[Any, ...], value: Any) -> bytes:
    """Return a valid sample file with one value replaced."""
    content = json.loads(encode(own_sample()))
    target = content
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return json.dumps(content).encode()


def write(content: bytes) -> Callable[[Path], None]:
    """Return a function that writes a file with this content."""

    def put(path: Path) -> None:
        path.write_bytes(content)

    return put


def link_to_sample(path: Path) -> None:
    """Create a symbolic link to a valid sample."""
    target = path.with_name("target")
    target.write_bytes(encode(own_sample()))
    path.symlink_to(target)


def bind_socket(path: Path) -> None:
    """Create a Unix socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


INVALID: dict[str, tuple[Callable[[Path], None], str]] = {
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
    "newer schema": (write(sample_with(("schema",), 2)), "unknown_schema"),
    "number as text": (write(sample_with(("process", "rank"), "0")), "malformed"),
    "unknown ending": (write(sample_with(("ended",), "paused")), "malformed"),
    "negative bytes": (
        write(sample_with(("devices", 0, "allocator", "reserved_bytes", "large"), -1)),
        "out_of_bounds",
    ),
    "number beyond 64 bits": (write(sample_with(("timestamp",), 10**400)), "out_of_bounds"),
    "pid zero": (write(sample_with(("process", "pid"), 0)), "out_of_bounds"),
    "pid beyond Linux": (write(sample_with(("process", "pid"), 1 << 40)), "out_of_bounds"),
    "short histogram": (write(sample_with(("steps", "duration_counts"), [1, 2])), "out_of_bounds"),
    "short block histogram": (
        write(sample_with(("devices", 0, "layout", "free_block_counts"), [1])),
        "out_of_bounds",
    ),
    "free block beyond free bytes": (
        write(sample_with(("devices", 0, "layout", "largest_free_block_bytes"), 1 << 60)),
        "out_of_bounds",
    ),
    "a thousand labels": (
        write(sample_with(("process", "labels"), {str(n): "x" for n in range(1000)})),
        "out_of_bounds",
    ),
    "a hundred devices": (
        write(sample_with(("devices",), [{"index": n} for n in range(100)])),
        "out_of_bounds",
    ),
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_file_is_rejected_and_counted_once(
    open_exporter: OpenExporter, run_dir: Path, kind: str
) -> None:
    """An invalid file is counted once, by its reason, and a healthy rank is still exported."""
    put, reason = INVALID[kind]
    publish(run_dir, own_sample())
    put(run_dir / NAME)
    exporter = open_exporter()

    for _ in range(3):
        metrics = scrape(exporter)

    assert dict.fromkeys(REASONS, 0.0) | {reason: 1.0} == metrics.by("reason", REJECTED)
    assert 1.0 == metrics.value("torchmem_process_state", rank="0", state="running")


def test_every_reason_starts_at_zero(open_exporter: OpenExporter) -> None:
    """Every counter exists from the start, so that `increase()` includes the first rejection."""
    assert dict.fromkeys(REASONS, 0.0) == scrape(open_exporter()).by("reason", REJECTED)


def test_new_version_of_an_invalid_file_counts_again(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """Each version of a file is counted, so a process that keeps writing invalid files shows."""
    exporter = open_exporter()
    for content in (b"invalid", b"also invalid"):
        publish(run_dir, content)
        metrics = scrape(exporter)

    assert 2.0 == metrics.value(REJECTED, reason="malformed")


def test_repaired_file_is_exported(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A rejected file is read again when it changes."""
    exporter = open_exporter()
    publish(run_dir, b"invalid", NAME)
    scrape(exporter)
    publish(run_dir, own_sample(), NAME)

    assert 1.0 == scrape(exporter).value("torchmem_process_state", state="running")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")
def test_file_of_another_user_is_rejected(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A file is rejected if another user owns the live process that it names."""
    os.chown(publish(run_dir, own_sample()), 12345, 12345)

    metrics = scrape(open_exporter())

    assert 1.0 == metrics.value(REJECTED, reason="foreign_owner")
    assert {} == metrics.matching("torchmem_process_state")


def test_number_of_files_per_user_is_limited(run_dir: Path) -> None:
    """The newest files of a user are exported, and the rest is counted."""
    for rank in range(MAX_FILES_PER_USER + 3):
        publish(run_dir, own_sample(process=own_process(rank=rank)), f"{rank}{SAMPLE_SUFFIX}")
    directory = RunDirectory(run_dir)

    assert MAX_FILES_PER_USER == len(directory.read(now=0.0))
    assert 3 == directory.rejections["too_many"]
    assert MAX_ENTRIES > MAX_FILES_PER_USER


def test_two_files_with_the_same_identity_give_one_process(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """The newest of two files with the same rank, pid and run is exported."""
    for name, steps in (("a", 10), ("b", 11)):
        sample = own_sample()
        publish(
            run_dir, replace(sample, steps=replace(sample.steps, count=steps)), name + SAMPLE_SUFFIX
        )

    metrics = scrape(open_exporter())

    assert 11.0 == metrics.value("torchmem_steps_total", rank="0")
    assert 1.0 == metrics.value(REJECTED, reason="duplicate")


def test_devices_without_uuid_are_exported_once(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A process with several devices without UUIDs still gives a valid exposition."""
    device = replace(own_sample().devices[0], uuid=None)
    publish(run_dir, own_sample(devices=(device, replace(device, index=1))))

    assert 1 == len(scrape(open_exporter()).matching("torchmem_reserved_bytes", pool="large"))


def test_text_is_shortened_and_made_printable() -> None:
    """Control characters in a label cannot reach a terminal or a log."""
    decoded = decode(encode(own_sample(process=own_process(run="a\n\x1b[31m\x00b" + "c" * 1000))))

    assert "a�" + "�[31m�b" == decoded.process.run[:9]
    assert MAX_TEXT == len(decoded.process.run)


@given(samples)
def test_every_sample_that_can_be_written_can_be_read(sample: Any) -> None:
    """Every sample that the SDK can publish is accepted; only its text may change."""
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
def test_any_bytes_are_decoded_or_rejected(content: bytes) -> None:
    """Invalid content raises RejectedSampleError and nothing else."""
    with suppress(RejectedSampleError):
        assert isinstance(decode(content), Sample)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value in a JSON document."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) else ()
    paths: list[tuple[Any, ...]] = []
    for key, item in items:
        paths += [(*path, key), *paths_of(item, (*path, key))]
    return paths


PATHS = paths_of(json.loads(encode(own_sample())))


@given(path=st.sampled_from(PATHS), value=json_values)
def test_any_value_in_a_sample_leaves_the_exposition_valid(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[Any, ...], value: Any
) -> None:
    """Whatever a sample file contains, the scrape is valid and includes the other ranks."""
    directory = tmp_path_factory.mktemp("hostile")
    publish(directory, sample_with(path, value))
    publish(directory, own_sample(process=own_process(rank=7)), NAME)
    exporter = Exporter(FakeNvml.of(), RunDirectory(directory))

    metrics = scrape(exporter)

    assert 1.0 == metrics.value("torchmem_exporter_collector_success", collector="samples")
    assert 1.0 == metrics.value("torchmem_process_state", rank="7", state="running")
