"""The ways out: the in-process endpoint, the textfile, the file in the run directory."""

from __future__ import annotations

import os
import socket
import stat
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.stack import free_port
from support.waiting import until

from torchmem.sample.run_directory import replace_file
from torchmem.sdk._capture import write_snapshot
from torchmem.sdk._publish import make_run_directory, sweep
from torchmem.sdk._session import Session
from torchmem.simulator.backend import SimulatedBackend

Opener = Callable[..., Session]


def scrape(url: str) -> set[str]:
    """Names of the samples that an endpoint serves."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - loopback
        text = answer.read().decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def _replace(path: Path) -> None:
    replace_file(path, bytes(1000))


def _snapshot(path: Path) -> None:
    write_snapshot(path, {"segments": [0] * 10})


def test_port_zero_serves_this_process(backend: SimulatedBackend, open_session: Opener) -> None:
    """`port=0` opens a free port on loopback that serves this rank's series and nobody else's."""
    session = open_session(backend, port=0)
    backend.step()

    assert session.url is not None
    names = scrape(session.url)
    assert "torchmem_reserved_bytes" in names
    assert not any(name.startswith(("python_", "process_")) for name in names)


def test_the_port_counts_up_with_the_local_rank(
    backend: SimulatedBackend, open_session: Opener
) -> None:
    """Rank 3 of a node listens on base + 3."""
    base = free_port() - 3
    session = open_session(backend, {"LOCAL_RANK": "3"}, port=base)

    assert f"http://127.0.0.1:{base + 3}/metrics" == session.url


def test_a_taken_port_falls_back(backend: SimulatedBackend, open_session: Opener) -> None:
    """When the port is taken the process serves on another one instead of failing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        session = open_session(backend, port=port)
        assert session.url is not None
        assert str(port) not in session.url
        assert "torchmem_process_info" in scrape(session.url)


def test_the_textfile_is_whole_and_goes_at_the_end(
    backend: SimulatedBackend, open_session: Opener, tmp_path: Path
) -> None:
    """node_exporter finds one valid file for the rank while it runs and none after a clean end."""
    session = open_session(backend, {"RANK": "2"}, textfile=tmp_path, interval=0.01)
    backend.step()
    path = tmp_path / "torchmem-rank2.prom"
    until(path.exists)

    names = {family.name for family in text_string_to_metric_families(path.read_text())}
    session.close()
    assert "torchmem_process_state" in names
    assert not path.exists()


def test_a_replaced_file_is_readable_by_the_exporter(tmp_path: Path) -> None:
    """Whatever the umask, the exporter's user can read the file, and no temporary file stays behind."""
    path = tmp_path / "sample"
    replace_file(path, b"old")
    replace_file(path, b"new")

    assert (b"new", 0o644) == (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    assert [path] == list(tmp_path.iterdir())


def test_the_run_directory_is_shared_and_sticky(tmp_path: Path) -> None:
    """All users may publish and none may remove another's file."""
    make_run_directory(tmp_path / "run")

    assert 0o1777 == stat.S_IMODE((tmp_path / "run").stat().st_mode)


def test_a_file_in_the_place_of_the_run_directory_is_an_error(tmp_path: Path) -> None:
    """Something that is no directory is not written through."""
    (tmp_path / "run").write_text("")

    with pytest.raises(FileExistsError):
        make_run_directory(tmp_path / "run")


def test_files_of_long_ago_are_swept(tmp_path: Path) -> None:
    """Where no exporter runs, samples of dead processes do not pile up for ever."""
    old, new, other = (tmp_path / name for name in ("1.sample.json", "2.sample.json", "notes.txt"))
    for path in (old, new, other):
        path.write_text("")
    os.utime(old, (1000, 1000))
    os.utime(other, (1000, 1000))
    sweep(tmp_path, before=2000)

    assert {new, other} == set(tmp_path.iterdir())


def test_what_a_killed_process_was_writing_is_swept(tmp_path: Path) -> None:
    """A file that was not finished when its process was killed does not stay for ever either."""
    for path in (tmp_path / ".1.sample.json.7.0.tmp", tmp_path / ".1.sample.json.8.0.tmp"):
        path.write_text("half of")
    os.utime(tmp_path / ".1.sample.json.7.0.tmp", (1000, 1000))
    sweep(tmp_path, before=2000)

    assert [".1.sample.json.8.0.tmp"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("write", [_replace, _snapshot], ids=["file", "snapshot"])
def test_threads_that_write_one_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Several threads may replace a file at once, as when two cards run out of memory: each write is done."""
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(write, path) for _ in range(400)]

    assert [None] * 400 == [future.result() for future in done]
    assert [path] == list(tmp_path.iterdir())
