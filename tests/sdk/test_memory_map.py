"""A process publishes its memory map while it is asked by one who may, and after an OOM."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.users import as_user, needs_root
from support.waiting import until

from torchmem.sample.memory_map import LEASE_SECONDS, MAP_SUFFIX, request_directory
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sdk.publish.memory_map import MapPublisher
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
NAME = "1-2-3"
Open = Callable[..., Session]


def ask(run_dir: Path, name: str, uid: int | None = None, age: float = 0.0) -> Path:
    """Write the request of an exporter that runs as a user, `age` seconds ago."""
    directory = request_directory(run_dir, os.geteuid() if uid is None else uid)
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    path = directory / name
    path.write_bytes(b"")
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.fixture
def publisher(tmp_path: Path) -> MapPublisher:
    """The map of a process that has published a sample."""
    sample = tmp_path / str(os.geteuid()) / f"{NAME}{SAMPLE_SUFFIX}"
    sample.parent.mkdir()
    return MapPublisher(sample, enabled=True)


def is_asked(publisher: MapPublisher) -> bool:
    """Whether the process is asked now."""
    publisher.at_tick()
    return publisher.is_asked


def test_a_request_holds_until_it_is_no_longer_renewed(
    publisher: MapPublisher, tmp_path: Path
) -> None:
    """A request of the own user counts for LEASE_SECONDS, and another file's not at all."""
    assert not is_asked(publisher)
    ask(tmp_path, "1-2-4")
    assert not is_asked(publisher)
    request = ask(tmp_path, NAME)
    assert is_asked(publisher)
    os.utime(request, (time.time() - LEASE_SECONDS - 1,) * 2)
    assert not is_asked(publisher)
    os.utime(request, (time.time() + LEASE_SECONDS + 9,) * 2)
    assert not is_asked(publisher)


@pytest.mark.parametrize("kind", ["directory", "link", "FIFO"])
def test_only_a_file_is_a_request(publisher: MapPublisher, tmp_path: Path, kind: str) -> None:
    """Links and special files are none, and cost no error."""
    path = ask(tmp_path, NAME)
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path)
    assert not is_asked(publisher)


def _rank_is_asked(run_dir: Path) -> bool:
    return is_asked(MapPublisher(run_dir / "1000" / f"{NAME}{SAMPLE_SUFFIX}", enabled=True))


@needs_root
@pytest.mark.parametrize(
    ("owner", "asker", "named", "granted"),
    [
        pytest.param(0, 0, 0, True, id="root"),
        pytest.param(9847, 9847, 9847, True, id="the owner of the run directory"),
        pytest.param(0, 1000, 1000, True, id="the own user"),
        pytest.param(0, 1001, 1001, False, id="another user"),
        pytest.param(0, 1001, 1000, False, id="another user with the directory of this one"),
        pytest.param(0, 1001, 0, False, id="another user with root's directory"),
        pytest.param(65534, 65534, 65534, False, id="users that a user namespace hides"),
    ],
)
def test_who_may_ask(shared_dir: Path, owner: int, asker: int, named: int, granted: bool) -> None:
    """Only the own user, root, and the run directory's owner may, and no one can pose as them."""
    os.chown(shared_dir, owner, owner)
    shared_dir.chmod(0o1777)
    as_user(asker, lambda: ask(shared_dir, NAME, named))

    assert granted == as_user(1000, lambda: _rank_is_asked(shared_dir))


@needs_root
def test_a_file_of_another_user_is_no_request(publisher: MapPublisher, tmp_path: Path) -> None:
    """Not even in the directory of one who may ask."""
    os.chown(ask(tmp_path, NAME), 1001, 1001)
    assert not is_asked(publisher)


@pytest.fixture
def rank(
    open_session: Open, allocator: DeviceCachingAllocator, backend: SimulatedBackend
) -> Callable[..., Session]:
    """Opens a session on a GPU with fragmented memory."""
    blocks = [allocator.malloc(3 * MIB) for _ in range(16)]
    for block in blocks[::2]:
        allocator.free(block)

    def start(**settings: Any) -> Session:
        session = open_session(
            backend, interval=0.02, snapshot_interval=0.02, snapshot_budget=1.0, **settings
        )
        session.step()
        return session

    return start


def the_map(run_dir: Path) -> dict[str, Any] | None:
    """The map in the run directory, or None."""
    for path in run_dir.rglob(f"*{MAP_SUFFIX}"):
        content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        return content
    return None


def stepped(session: Session, is_done: bool) -> bool:
    """Go on training, and return `is_done`."""
    session.step()
    return is_done


def name_of(published: Callable[[], list[dict[str, Any]]], run_dir: Path) -> str:
    """The name that this process's request needs, once it has published."""
    until(lambda: bool(published()))
    (path,) = run_dir.rglob(f"*{SAMPLE_SUFFIX}")
    return path.name.removesuffix(SAMPLE_SUFFIX)


def test_the_map_lives_as_long_as_the_request(
    rank: Open, published: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """It appears when it is asked for, agrees with the sample, and is removed afterwards."""
    rank()
    request = ask(tmp_path, name_of(published, tmp_path))
    until(lambda: the_map(tmp_path) is not None)
    found = the_map(tmp_path)
    assert found is not None
    (device,) = found["devices"]
    (sample,) = published()
    assert sample["memory_map"] is True
    newest = sample["devices"][0]
    assert newest["layout"] | {"timestamp": 0} == device["layout"] | {"timestamp": 0}
    sizes = [size for segment in device["segments"] for size in segment["sizes"]]
    assert sum(sizes) == sum(filter(None, newest["allocator"]["reserved_bytes"].values()))

    request.unlink()
    until(lambda: the_map(tmp_path) is None)


def test_no_map_without_the_setting(
    rank: Open, published: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """With memory_map=False the sample says so, and neither a request nor an OOM has an effect."""
    session = rank(memory_map=False)
    ask(tmp_path, name_of(published, tmp_path))
    stamp = published()[0]["timestamp"]
    until(lambda: stepped(session, published()[0]["timestamp"] > stamp + 0.2))

    assert published()[0]["memory_map"] is False
    assert the_map(tmp_path) is None


def test_an_oom_leaves_its_map_until_training_goes_on(
    rank: Open, allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    """The map of a rank that died of an OOM is there unasked; after a caught one it goes."""
    session = rank()
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(4096 * MIB)
    assert (found := the_map(tmp_path)) is not None
    assert (
        sum(
            size
            for segment in found["devices"][0]["segments"]
            for size, state in zip(segment["sizes"], segment["states"], strict=True)
            if state == "a"
        )
        == 8 * 3 * MIB
    )

    session.step()
    until(lambda: the_map(tmp_path) is None)


def test_the_last_map_of_a_watched_process_stays(
    rank: Open, published: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The page can still show it after the process has ended."""
    session = rank()
    ask(tmp_path, name_of(published, tmp_path))
    until(lambda: the_map(tmp_path) is not None)
    session.close()
    assert the_map(tmp_path) is not None


def test_a_map_that_cannot_be_written_is_an_error_that_is_counted(
    rank: Open, published: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Training and the sample go on."""
    session = rank()
    name = name_of(published, tmp_path)
    (path,) = tmp_path.rglob(f"*{SAMPLE_SUFFIX}")
    path.with_name(f"{name}{MAP_SUFFIX}").mkdir()
    ask(tmp_path, name)
    until(lambda: stepped(session, published()[0]["cost"]["errors"].get("memory_map")))
