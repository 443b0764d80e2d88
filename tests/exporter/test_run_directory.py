"""Files of the run directory that any user may have written: invalid ones are rejected."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import scrape
from support.publishing import (
    own_process,
    own_sample,
    publish,
    user_directory,
)
from support.samples import samples

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.budgets import MAX_FILES_PER_USER, MAX_SERIES_PER_USER, PageShare
from torchmem.exporter.collect import Exporter
from torchmem.exporter.rejections import REASONS, RejectedSampleError
from torchmem.exporter.sample_files import RunDirectory, decode
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
    "negative rank": (write(sample_with(("process", "rank"), -1)), "out_of_bounds"),
    "number beyond 64 bits": (write(sample_with(("timestamp",), 10**400)), "out_of_bounds"),
    "pid zero": (write(sample_with(("process", "pid"), 0)), "out_of_bounds"),
    "pid beyond Linux": (write(sample_with(("process", "pid"), 1 << 40)), "out_of_bounds"),
    "short histogram": (write(sample_with(("steps", "duration_counts"), [1, 2])), "out_of_bounds"),
    "a thousand labels": (
        write(sample_with(("process", "labels"), {str(n): "x" for n in range(1000)})),
        "out_of_bounds",
    ),
    "a hundred devices": (
        write(sample_with(("devices",), [{"index": n} for n in range(100)])),
        "out_of_bounds",
    ),
}


IMPOSSIBLE = {
    "negative": sample_with(("devices", 0, "components", "rounding"), -5_988_656),
    "too_large": sample_with(("devices", 0, "driver_free_bytes"), 1 << 70),
    "contradictory": sample_with(("devices", 0, "layout", "free_block_counts"), [1]),
}


@pytest.mark.parametrize(
    "launch",
    ["", "3f9a2c71", "1000-3F9A2C71", "1000-3f9a2c71\n", "-1-3f9a2c71", "01-3f9a2c71", "x" * 150],
)
def test_a_launch_without_the_form_of_one_is_unknown(
    open_exporter: OpenExporter, run_dir: Path, launch: str
) -> None:
    """A label `launch` that no SDK writes is absent, and the rank's series are complete."""
    publish(run_dir, own_sample(process=own_process(launch=launch)))

    assert scrape(open_exporter()).by("launch", "torchmem_steps_total").keys() == {""}


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_an_impossible_value_is_left_out_and_counted_once(
    open_exporter: OpenExporter, run_dir: Path, reason: str
) -> None:
    """A rank with an impossible value keeps its other series, as with samples of older SDKs."""
    write(IMPOSSIBLE[reason])(user_directory(run_dir) / NAME)
    exporter = open_exporter()
    for _ in range(3):
        shown = scrape(exporter)

    assert shown.value("torchmem_exporter_impossible_values_total", reason=reason) == 1
    assert len(shown.matching("torchmem_steps_total")) == 1
    assert len(shown.matching("torchmem_reserved_bytes")) == 2


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_file_is_rejected_and_counted_once(
    open_exporter: OpenExporter, run_dir: Path, kind: str
) -> None:
    """An invalid file is counted once, by its reason, and a healthy rank is still exported."""
    put, reason = INVALID[kind]
    publish(run_dir, own_sample())
    put(user_directory(run_dir) / NAME)
    exporter = open_exporter()

    for _ in range(3):
        metrics = scrape(exporter)

    assert dict.fromkeys(REASONS, 0.0) | {reason: 1.0} == metrics.by("reason", REJECTED)
    assert metrics.value("torchmem_process_state", rank="0", state="running") == 1.0


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

    assert metrics.value(REJECTED, reason="malformed") == 2.0


def test_repaired_file_is_exported(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A rejected file is read again when it changes."""
    exporter = open_exporter()
    publish(run_dir, b"invalid", NAME)
    scrape(exporter)
    publish(run_dir, own_sample(), NAME)

    assert scrape(exporter).value("torchmem_process_state", state="running") == 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")
def test_file_of_another_user_is_rejected(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A file is rejected if another user owns the live process that it names."""
    os.chown(publish(run_dir, own_sample()), 12345, 12345)

    metrics = scrape(open_exporter())

    assert metrics.value(REJECTED, reason="foreign_owner") == 1.0
    assert metrics.matching("torchmem_process_state") == {}


def test_a_user_has_a_budget_of_files_and_series(run_dir: Path) -> None:
    """What exceeds one user's budget is counted once, and the newest files are exported."""
    for rank in range(MAX_FILES_PER_USER + 3):
        publish(run_dir, own_sample(process=own_process(rank=rank)), f"{rank}{SAMPLE_SUFFIX}")
    directory = RunDirectory(run_dir)
    for _ in range(2):
        published = directory.read(time.time())

    assert len(published) + directory.rejections["over_budget"] == MAX_FILES_PER_USER + 3
    series = sum(len(PageShare.of(item.sample, item.pid).series) for item in published)
    assert 0.99 * MAX_SERIES_PER_USER < series <= MAX_SERIES_PER_USER


def test_old_files_of_a_restarting_job_are_no_junk(run_dir: Path) -> None:
    """Files beyond the limit whose time to live is over are not counted as rejected."""
    for rank in range(MAX_FILES_PER_USER + 3):
        ended = own_sample(process=own_process(rank=rank, start_ticks=1), ended="exited")
        publish(run_dir, ended, f"{rank}{SAMPLE_SUFFIX}")
    directory = RunDirectory(run_dir, ttl_seconds=900)

    assert directory.read(time.time() + 1000) == []
    assert sum(directory.rejections.values()) == 0


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

    assert metrics.value("torchmem_steps_total", rank="0") == 11.0
    assert metrics.value(REJECTED, reason="duplicate") == 1.0


@given(st.permutations([(4026530001, 100), (4026530002, 200), (4026530003, 200)]))
def test_labels_of_containers_do_not_depend_on_the_order(order: Sequence[tuple[int, int]]) -> None:
    """Ranks that have pid 1 in different containers keep their labels, also in a new exporter."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        for number, (namespace, ticks) in enumerate(order):
            process = own_process(pid=1, pid_namespace=namespace, start_ticks=ticks)
            publish(Path(folder), own_sample(process=process), f"{number}{SAMPLE_SUFFIX}")
            pid_labels(directory)

        user = os.geteuid()
        expected = {
            4026530001: None,
            4026530002: f"1@4026530002-{user}",
            4026530003: f"1@4026530003-{user}",
        }
        assert expected == pid_labels(directory) == pid_labels(RunDirectory(Path(folder)))


def pid_labels(directory: RunDirectory) -> Mapping[int | None, str | None]:
    """Return the longer label pid of each process, by pid namespace."""
    return {
        item.sample.process.pid_namespace: item.pid_label for item in directory.read(time.time())
    }


def test_devices_without_uuid_are_exported_once(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A process with several devices without UUIDs still gives a valid exposition."""
    device = replace(own_sample().devices[0], uuid=None)
    publish(run_dir, own_sample(devices=(device, replace(device, index=1))))

    assert len(scrape(open_exporter()).matching("torchmem_reserved_bytes", pool="large")) == 1


def test_text_is_shortened_and_made_printable() -> None:
    """Control characters in a label cannot reach a terminal or a log."""
    decoded = decode(encode(own_sample(process=own_process(run="a\n\x1b[31m\x00b" + "c" * 1000))))

    assert decoded.process.run[:9] == "a�" + "�[31m�b"
    assert 195 < len(decoded.process.run.encode()) <= MAX_TEXT


def test_text_is_bounded_in_bytes() -> None:
    """A label takes at most MAX_TEXT bytes of the page, and is cut between two characters."""
    decoded = decode(encode(own_sample(process=own_process(run="😀" * 1000))))

    assert decoded.process.run == "😀" * (MAX_TEXT // 4)


def test_a_file_from_the_future_expires(run_dir: Path) -> None:
    """A time that its user sets does not keep a file on the page, and no time is later than now."""
    future, now = time.time() + 10**9, time.time() + 1
    device = replace(own_sample().devices[0], stats_timestamp=future)
    ended = own_sample(ended="exited", timestamp=future, devices=(device,))
    path = publish(run_dir, ended)
    os.utime(path, (future, future))
    directory = RunDirectory(run_dir, ttl_seconds=900)
    (item,) = directory.read(now)

    assert now == item.sample.timestamp
    assert now == item.sample.devices[0].stats_timestamp
    # Not closer: the clock of the file system lags by milliseconds, a busy machine by seconds.
    assert len(directory.read(now + 840)) == 1
    assert directory.read(now + 960) == []


def test_room_of_the_run_directory(open_exporter: OpenExporter, run_dir: Path) -> None:
    """Size and free bytes and files are those of the run directory's file system."""
    publish(run_dir, own_sample())
    metrics, room = scrape(open_exporter()), os.statvfs(run_dir)
    prefix = "torchmem_exporter_run_directory"

    assert room.f_blocks * room.f_frsize == metrics.value(f"{prefix}_size_bytes")
    assert (metrics.value(f"{prefix}_free_bytes") or 0) > 0
    assert room.f_files == (metrics.value(f"{prefix}_inodes") or 0)


def replace_by_file(path: Path) -> None:
    """Put a file in place of the directory."""
    path.rmdir()
    path.touch()


def remove_with_parent(path: Path) -> None:
    """Remove the directory and the one that contains it."""
    path.rmdir()
    path.parent.rmdir()


PROBLEMS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "shared": (lambda path: path.chmod(0o3777), None),
    "private": (lambda path: path.chmod(0o700), None),
    "not sticky": (lambda path: path.chmod(0o777), "not_sticky"),
    "a file": (replace_by_file, "unreadable"),
    "a user's": (lambda path: os.chown(path, 61001, 61001), "foreign_owner"),
    "missing": (lambda path: path.rmdir(), None),
    "no parent": (remove_with_parent, "missing"),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="giving directories to another user needs root")
@pytest.mark.parametrize("kind", PROBLEMS)
def test_problem_of_the_run_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A run directory that hides ranks or protects no user is a metric, and logged once."""
    change, problem = PROBLEMS[kind]
    path = tmp_path / "parent" / "run"
    path.mkdir(parents=True)
    change(path)
    exporter = Exporter(FakeNvml.of(), RunDirectory(path))
    for _ in range(2):
        problems = scrape(exporter).by("problem", "torchmem_exporter_run_directory_problem")

    assert [problem] * (problem is not None) == [name for name, on in problems.items() if on]
    assert (problem is not None) == sum("run directory" in text for text in caplog.messages)


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

    assert metrics.value("torchmem_exporter_collector_success", collector="samples") == 1.0
    assert metrics.value("torchmem_process_state", rank="7", state="running") == 1.0
