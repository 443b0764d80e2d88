"""The outputs of a process: its file in the run directory, the textfile, and the endpoint."""

from __future__ import annotations

import os
import socket
import stat
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families
from support.samples import full_sample, samples
from support.stack import free_port
from support.waiting import until

from torchmem.sample.run_directory import replace_file
from torchmem.sample.sample import Sample, encode
from torchmem.sdk._capture import write_snapshot
from torchmem.sdk._cost import HEARTBEAT_SECONDS, TEXTFILE_SECONDS
from torchmem.sdk._outputs import Textfile
from torchmem.sdk._publish import SampleFile, make_run_directory, remove_stale_files
from torchmem.sdk._session import Session
from torchmem.simulator.backend import SimulatedBackend

Opener = Callable[..., Session]


def is_written(file: SampleFile, sample: Sample) -> bool:
    """Whether `refresh` writes the file."""
    file.path.unlink(missing_ok=True)
    file.refresh(sample)
    return file.path.exists()


def later(sample: Sample, seconds: float) -> Sample:
    """The same state at another time, after the SDK has spent more."""
    spent = replace(
        sample.cost, cpu_seconds=sample.cost.cpu_seconds + 1, stats_duration_seconds=1.0
    )
    return replace(sample, timestamp=sample.timestamp + seconds, cost=spent)


def test_an_unchanged_sample_is_not_published_again(tmp_path: Path) -> None:
    """A process at rest writes its file once per heartbeat, not once per tick."""
    file, sample = SampleFile(tmp_path, "1.sample.json"), full_sample()

    ticks = int(20 * HEARTBEAT_SECONDS)
    assert 20 == sum(is_written(file, later(sample, tick)) for tick in range(ticks))


CHANGES: dict[str, Callable[[Sample], Sample]] = {
    "step": lambda s: replace(s, steps=replace(s.steps, count=s.steps.count + 1)),
    "oom": lambda s: replace(s, oom_pending=not s.oom_pending),
    "end": lambda s: replace(s, ended="exited"),
    "bytes": lambda s: replace(s, devices=(replace(s.devices[0], total_bytes=1),)),
    "snapshot": lambda s: replace(s, devices=(replace(s.devices[0], layout=None),)),
    "settings": lambda s: replace(s, allocator_settings={"backend": "other"}),
    "error": lambda s: replace(s, cost=replace(s.cost, errors={"publish": 2})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_sample_is_published_at_the_next_tick(
    change: Callable[[Sample], Sample], tmp_path: Path
) -> None:
    """Every change except to the clock and to the SDK's own cost is published."""
    file, sample = SampleFile(tmp_path, "1.sample.json"), full_sample()
    file.write(sample)

    assert not is_written(file, later(sample, 1.0))
    assert is_written(file, change(later(sample, 1.0)))


def test_a_clock_set_back_does_not_stop_the_heartbeat(tmp_path: Path) -> None:
    """If the node's clock jumps back an hour, the file is written and not withheld for an hour."""
    file, sample = SampleFile(tmp_path, "1.sample.json"), full_sample()
    file.write(sample)

    assert is_written(file, later(sample, -3600.0))


def test_a_vanished_run_directory_is_created_again(tmp_path: Path) -> None:
    """A cleaner of temporary files does not make a publication fail."""
    file = SampleFile(tmp_path / "run", "1.sample.json")
    file.write(full_sample())
    file.path.unlink()
    file.path.parent.rmdir()
    file.write(full_sample())

    assert encode(full_sample()) == file.path.read_bytes()


@given(samples)
def test_a_published_sample_is_no_news(sample: Sample) -> None:
    """Whatever it holds, a sample that was published is not published again a moment later."""
    file = SampleFile(Path("/nowhere"), "1.sample.json")
    file.newest = sample

    file.refresh(later(sample, 1.0))

    assert sample is file.newest


def test_the_textfile_is_rendered_rarely(tmp_path: Path) -> None:
    """Rendering is the most expensive output, so ticks within ten seconds share one."""
    textfile, sample = Textfile(tmp_path, 0), full_sample()
    textfile.refresh(sample)
    textfile.path.unlink()

    textfile.refresh(later(sample, TEXTFILE_SECONDS - 1))
    assert not textfile.path.exists()
    textfile.refresh(later(sample, TEXTFILE_SECONDS))
    assert textfile.path.exists()


def scrape(url: str) -> set[str]:
    """Names of the samples that an endpoint serves."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - loopback
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


def test_port_zero_serves_this_process(backend: SimulatedBackend, open_session: Opener) -> None:
    """`port=0` opens a free port on loopback that serves only this rank's series."""
    session = open_session(backend, port=0)
    backend.step()

    assert session.url is not None
    names = scrape(session.url)
    assert "torchmem_reserved_bytes" in names
    assert not any(name.startswith(("python_", "process_")) for name in names)


def test_the_port_counts_up_with_the_local_rank(
    backend: SimulatedBackend, open_session: Opener
) -> None:
    """Rank 3 of a node listens on port + 3."""
    base = free_port() - 3
    session = open_session(backend, {"LOCAL_RANK": "3"}, port=base)

    assert f"http://127.0.0.1:{base + 3}/metrics" == session.url


def test_a_taken_port_falls_back(backend: SimulatedBackend, open_session: Opener) -> None:
    """If the port is taken, the process serves on another one instead of failing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        session = open_session(backend, port=port)
        assert session.url is not None
        assert str(port) not in session.url
        assert "torchmem_process_info" in scrape(session.url)


def test_the_textfile_is_complete_and_removed_at_the_end(
    backend: SimulatedBackend, open_session: Opener, tmp_path: Path
) -> None:
    """node_exporter finds one valid file for the rank while it runs, and none after a clean end."""
    session = open_session(backend, {"RANK": "2"}, textfile=tmp_path, interval=0.01)
    backend.step()
    path = tmp_path / "torchmem-rank2.prom"
    until(path.exists)

    names = {family.name for family in text_string_to_metric_families(path.read_text())}
    session.close()
    assert "torchmem_process_state" in names
    assert not path.exists()


def test_a_replaced_file_is_readable_by_the_exporter(tmp_path: Path) -> None:
    """Whatever the umask, the exporter's user can read the file, and no temporary file remains."""
    path = tmp_path / "sample"
    replace_file(path, b"old")
    replace_file(path, b"new")

    assert (b"new", 0o644) == (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    assert [path] == list(tmp_path.iterdir())


def test_the_run_directory_is_shared_and_sticky(tmp_path: Path) -> None:
    """All users may publish, and no user can remove another's file."""
    make_run_directory(tmp_path / "run")

    assert 0o1777 == stat.S_IMODE((tmp_path / "run").stat().st_mode)


def test_a_file_in_place_of_the_run_directory_is_an_error(tmp_path: Path) -> None:
    """What is not a directory is not written to."""
    (tmp_path / "run").write_text("")

    with pytest.raises(FileExistsError):
        make_run_directory(tmp_path / "run")


def test_stale_files_are_removed(tmp_path: Path) -> None:
    """Where no exporter runs, samples of dead processes do not pile up."""
    old, new, other = (tmp_path / name for name in ("1.sample.json", "2.sample.json", "notes.txt"))
    for path in (old, new, other):
        path.write_text("")
    os.utime(old, (1000, 1000))
    os.utime(other, (1000, 1000))
    remove_stale_files(tmp_path, before=2000)

    assert {new, other} == set(tmp_path.iterdir())


def test_stale_temporary_files_are_removed(tmp_path: Path) -> None:
    """A file that a killed process had not finished does not stay either."""
    for path in (tmp_path / ".1.sample.json.7.0.tmp", tmp_path / ".1.sample.json.8.0.tmp"):
        path.write_text("half of")
    os.utime(tmp_path / ".1.sample.json.7.0.tmp", (1000, 1000))
    remove_stale_files(tmp_path, before=2000)

    assert [".1.sample.json.8.0.tmp"] == [path.name for path in tmp_path.iterdir()]


def _replace(path: Path) -> None:
    replace_file(path, bytes(1000))


def _snapshot(path: Path) -> None:
    write_snapshot(path, {"segments": [0] * 10})


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("write", [_replace, _snapshot], ids=["file", "snapshot"])
def test_threads_may_write_one_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Several threads may replace a file at once, as when two cards run out of memory."""
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write, path) for _ in range(400)]

    assert [None] * 400 == [future.result() for future in writes]
    assert [path] == list(tmp_path.iterdir())
