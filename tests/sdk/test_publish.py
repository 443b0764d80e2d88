"""The outputs of a process: its file in the run directory, the textfile, and the endpoint."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families
from support.exposition import Exposition
from support.samples import full_sample, samples
from support.stack import free_port
from support.waiting import until

from torchmem.host.procfs import own_start_ticks, pid_namespace
from torchmem.sample.run_directory import is_user_directory, replace_file
from torchmem.sample.sample import Sample, encode
from torchmem.sdk.capture.capture import write_snapshot
from torchmem.sdk.publish.outputs import Textfile, registry
from torchmem.sdk.publish.sample_file import (
    ENDED_FILE_SECONDS,
    STALE_FILE_SECONDS,
    SampleFile,
    make_run_directory,
    make_user_directory,
    remove_stale_files,
    restore_directory,
)
from torchmem.sdk.safety.cost import HEARTBEAT_SECONDS, TEXTFILE_SECONDS
from torchmem.sdk.session import Session
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
    devices = tuple(
        replace(device, stats_timestamp=(device.stats_timestamp or 0.0) + seconds)
        for device in sample.devices
    )
    return replace(sample, timestamp=sample.timestamp + seconds, cost=spent, devices=devices)


def test_an_unchanged_sample_is_not_published_again(tmp_path: Path) -> None:
    """A process at rest writes its file once per heartbeat, not once per tick."""
    file, sample = SampleFile(tmp_path, "1.sample.json"), full_sample()

    ticks = int(20 * HEARTBEAT_SECONDS)
    assert sum(is_written(file, later(sample, tick)) for tick in range(ticks)) == 20


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
    shutil.rmtree(file.path.parent)
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
    textfile, sample = Textfile(tmp_path), full_sample()
    textfile.refresh(sample)
    [path] = tmp_path.iterdir()
    path.unlink()

    textfile.refresh(later(sample, TEXTFILE_SECONDS - 1))
    assert not path.exists()
    textfile.refresh(later(sample, TEXTFILE_SECONDS))
    assert path.exists()


def test_the_textfile_follows_the_rank(tmp_path: Path) -> None:
    """A rank that becomes known later moves the file, and leaves none behind."""
    textfile, sample = Textfile(tmp_path), full_sample()
    for rank in (0, 3):
        textfile.write(replace(sample, process=replace(sample.process, rank=rank)))

    assert [path.name for path in tmp_path.iterdir()] == ["torchmem-rank3.prom"]


def scrape(url: str) -> set[str]:
    """Names of the samples that an endpoint serves."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - loopback
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


def test_port_zero_serves_this_process(backend: SimulatedBackend, open_session: Opener) -> None:
    """`port=0` opens a free port on loopback that serves only this rank's series."""
    session = open_session(backend, port=0, interval=0.01)
    backend.step()

    names = scrape(until(lambda: session.url))
    assert "torchmem_reserved_bytes" in names
    assert not any(name.startswith(("python_", "process_")) for name in names)


def test_the_port_counts_up_with_the_local_rank(
    backend: SimulatedBackend, open_session: Opener
) -> None:
    """Rank 3 of a node listens on port + 3."""
    base = free_port() - 3
    session = open_session(backend, {"LOCAL_RANK": "3"}, port=base, interval=0.01)
    backend.step()

    assert until(lambda: session.url) == f"http://127.0.0.1:{base + 3}/metrics"


def test_a_taken_port_falls_back(backend: SimulatedBackend, open_session: Opener) -> None:
    """If the port is taken, the process serves on another one instead of failing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        session = open_session(backend, port=port, interval=0.01)
        backend.step()
        url = until(lambda: session.url)
        assert str(port) not in url
        assert "torchmem_process_info" in scrape(url)


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

    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o644)
    assert [path] == list(tmp_path.iterdir())


def test_the_run_directory_is_shared_and_sticky(tmp_path: Path) -> None:
    """All users may publish, and no user can remove another's file."""
    make_run_directory(tmp_path / "run")

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o1777


def test_a_file_in_place_of_the_run_directory_is_an_error(tmp_path: Path) -> None:
    """What is not a directory is not written to."""
    (tmp_path / "run").write_text("")

    with pytest.raises(FileExistsError):
        make_run_directory(tmp_path / "run")


def test_the_directory_of_a_user_is_private(tmp_path: Path) -> None:
    """Where only root or this user can be the exporter, no other user can read the files."""
    directory = make_user_directory(tmp_path / "run")

    assert tmp_path / "run" / str(os.geteuid()) == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory == make_user_directory(tmp_path / "run")


def test_the_group_of_the_exporter_can_read(tmp_path: Path) -> None:
    """In a set-group-ID run directory, the exporter's group reads each user's directory."""
    tmp_path.chmod(0o3777)
    status = make_user_directory(tmp_path).stat()

    assert (0o750, tmp_path.stat().st_gid) == (status.st_mode & 0o777, status.st_gid)


def squat_with_link(path: Path) -> None:
    """Take a name with a link to a directory of one's own."""
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


SQUATTERS: dict[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "link": squat_with_link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "FIFO": os.mkfifo,
}


@pytest.mark.parametrize("squat", SQUATTERS.values(), ids=SQUATTERS)
def test_a_squatted_name_is_given_up(tmp_path: Path, squat: Callable[[Path], object]) -> None:
    """If the name of the user's directory is taken, the process publishes under another one."""
    squat(tmp_path / str(os.geteuid()))
    directory = make_user_directory(tmp_path)
    SampleFile(directory, "1-2-3.sample.json").write(full_sample())

    assert is_user_directory(directory.name)
    assert [path.name for path in directory.glob("*.json")] == ["1-2-3.sample.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving directories to another user needs root")
def test_the_directory_of_another_user_is_given_up(tmp_path: Path) -> None:
    """A directory with this user's name that belongs to another user is not written to."""
    squatted = tmp_path / str(os.geteuid())
    squatted.mkdir()
    os.chown(squatted, 61001, 61001)

    assert squatted != make_user_directory(tmp_path)
    with pytest.raises(PermissionError):
        restore_directory(squatted)


def squat_with_many_names(run_dir: Path) -> None:
    """Take this user's name, and 500 names like those of its fallback, for another user."""
    for name in (str(os.geteuid()), *(f"{os.geteuid()}-{n:016x}" for n in range(500))):
        (run_dir / name).mkdir()
        os.chown(run_dir / name, 61001, 61001)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving directories to another user needs root")
@pytest.mark.parametrize("is_lock_held", [False, True])
def test_processes_share_one_fallback(tmp_path: Path, is_lock_held: bool) -> None:
    """All processes of a user whose name is taken publish in one directory, however many start."""
    squat_with_many_names(tmp_path)
    holder = os.open(tmp_path, os.O_RDONLY)
    if is_lock_held:
        fcntl.flock(holder, fcntl.LOCK_EX)
        first = make_user_directory(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(make_user_directory, [tmp_path] * 8))
    os.close(holder)

    assert len(found) == 1
    assert not is_lock_held or found == {first}
    assert os.geteuid() == found.pop().stat().st_uid


def test_threads_create_one_directory(tmp_path: Path) -> None:
    """Processes that start at the same time share their user's directory."""
    with ThreadPoolExecutor(16) as pool:
        directories = set(pool.map(make_user_directory, [tmp_path / "run"] * 64))

    assert {tmp_path / "run" / str(os.geteuid())} == directories


GONE = f"{pid_namespace()}-{os.getpid()}-1"  # an earlier process with the pid of this one
STALE = {
    f"{GONE}.sample.json",
    f"{GONE}.capture-answer.json",
    f"{GONE}.oom.snapshot.pickle",
    f".{GONE}.sample.json.7.0.tmp",
    f".{GONE}-2.oom.json.7.0.tmp",
}
OF_THE_USER = {
    "notes.tmp",
    "my.sample.json",
    "best.snapshot.pickle",
    "1-2.sample.json",
    f"{GONE}.sample.json.bak",
    f"{GONE}.sample.json.7.0.tmp",
    f"x{GONE}.sample.json",
    f"{GONE}-2.oom.json",
}


def test_only_files_of_our_own_form_are_swept(tmp_path: Path) -> None:
    """Old files of ended processes are removed, and never a file that this package did not name."""
    for name in STALE | OF_THE_USER:
        (tmp_path / name).touch()
    remove_stale_files(tmp_path, now=time.time() + ENDED_FILE_SECONDS - 60)
    assert {path.name for path in tmp_path.iterdir()} == STALE | OF_THE_USER

    remove_stale_files(tmp_path, now=time.time() + ENDED_FILE_SECONDS + 60)
    assert {path.name for path in tmp_path.iterdir()} == OF_THE_USER


def test_files_of_processes_that_may_live_stay_for_a_day(tmp_path: Path) -> None:
    """A process that is stopped for hours, or in another container, keeps its file."""
    alive = f"{pid_namespace()}-{os.getpid()}-{own_start_ticks()}.sample.json"
    names = {alive, "1-2-3.sample.json"}
    for name in names:
        (tmp_path / name).touch()
    remove_stale_files(tmp_path, now=time.time() + STALE_FILE_SECONDS - 60)

    assert names == {path.name for path in tmp_path.iterdir()}
    remove_stale_files(tmp_path, now=time.time() + STALE_FILE_SECONDS + 60)
    assert list(tmp_path.iterdir()) == []


def test_the_users_files_in_the_run_directory_stay(
    tmp_path: Path, backend: SimulatedBackend, open_session: Opener
) -> None:
    """A run directory with files of one's own, however old, loses none of them."""
    files = {f"{GONE}.sample.json", "best.snapshot.pickle", "notes.tmp"}
    for name in files:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000, 1000))
    session = open_session(backend)
    backend.step()
    session.close()

    assert files < {path.name for path in tmp_path.iterdir()}


def _replace(path: Path) -> None:
    replace_file(path, bytes(1000))


def _snapshot(path: Path) -> None:
    write_snapshot(path, {"segments": [0] * 10})


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("write", [_replace, _snapshot], ids=["file", "snapshot"])
def test_threads_may_write_one_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Several threads may replace a file at once, as when two GPUs run out of memory."""
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write, path) for _ in range(400)]

    assert [future.result() for future in writes] == [None] * 400
    assert [path] == list(tmp_path.iterdir())


def test_the_endpoint_judges_its_rank_by_the_shipped_thresholds() -> None:
    """What threatens the rank first is a series there, too, until it has ended."""

    def threats(sample: Sample) -> set[str]:
        shown = Exposition(registry(lambda: sample).collect())
        return {*shown.by("threat", "torchmem_threat_info")}

    assert threats(full_sample()) == {"fragmentation"}
    assert threats(replace(full_sample(), ended="exited")) == set()
