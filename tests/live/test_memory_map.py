"""The memory map over HTTP: who may see it, what is asked of the rank, and hostile files."""

from __future__ import annotations

import gzip
import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from support import raw_http
from support.maps import full_map, map_of
from support.publishing import own_process, own_sample, publish, replace_file
from support.samples import UUID
from support.snapshots import segments
from support.users import as_user, needs_root
from support.waiting import until

from torchmem import sdk
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.map_file import MAX_OBJECTS, MapFiles, checked
from torchmem.exporter.live.memory_map import Requests
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.node.published import Published
from torchmem.sample.memory_map import (
    LEASE_SECONDS,
    MAP_SUFFIX,
    MAX_BLOCKS,
    MAX_COMMAS,
    MAX_JSON_BYTES,
    MAX_MAP_BYTES,
    MemoryMap,
    encode,
    request_directory,
)
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

MIB = 1 << 20
NOW = 1.8e9


@pytest.fixture
def run_dir(shared_dir: Path) -> Path:
    directory = shared_dir / "run"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


@pytest.fixture
def server(run_dir: Path) -> Iterator[ExporterServer]:
    exporter = Exporter(FakeNvml.of(), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter)) as running:
        yield running


@pytest.fixture
def client(server: ExporterServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        # After it, no scrape shares the collection of the start, which knows no rank.
        assert client.get("/metrics").is_success
        yield client


def ids(run_dir: Path) -> list[str]:
    """The public names of the ranks in the run directory."""
    samples = sorted(run_dir.glob(f"*/*{SAMPLE_SUFFIX}"))
    names = [str(path.relative_to(run_dir)) for path in samples]
    return [Published(own_sample(), 1, "running", True, path=name).id for name in names]


def ask(run_dir: Path, client: httpx.Client, **headers: str) -> httpx.Response:
    """Ask for the map of the only rank, of which the exporter knows since a scrape."""
    (id_,) = ids(run_dir)
    assert client.get("/metrics").is_success
    return client.get("/api/v1/map", params={"id": id_}, headers=headers)


def rank(run_dir: Path, **changes: Any) -> Path:
    """Publish the sample of a rank, and return where its map belongs."""
    sample = publish(run_dir, own_sample(memory_map=True, **changes))
    return sample.with_name(sample.name.removesuffix(SAMPLE_SUFFIX) + MAP_SUFFIX)


def requests(run_dir: Path) -> list[Path]:
    """The requests of the exporter."""
    return sorted(request_directory(run_dir, os.geteuid()).glob("*"))


def decode(gzipped: bytes) -> MemoryMap:
    """Decode what a browser gets."""
    return msgspec.json.decode(gzip.decompress(gzipped), type=MemoryMap, strict=True)


def test_a_rank_is_asked_and_its_map_is_served(run_dir: Path, client: httpx.Client) -> None:
    """202 until the map is there, then the map; 304 while it is the same; gzipped if possible."""
    path = rank(run_dir)
    assert ((answer := ask(run_dir, client)).status_code, *answer.json()) == (202, "waiting")
    (request,) = requests(run_dir)
    assert (b"", path.name.removesuffix(MAP_SUFFIX)) == (request.read_bytes(), request.name)

    replace_file(path, encode(full_map()))
    answer = ask(run_dir, client)
    assert (answer.status_code, answer.headers["Content-Encoding"]) == (200, "gzip")
    assert json.loads(gzip.decompress(encode(full_map()))) == answer.json()
    plain = ask(run_dir, client, **{"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    assert answer.json() == plain.json()
    assert ask(run_dir, client, **{"If-None-Match": answer.headers["ETag"]}).status_code == 304

    replace_file(path, encode(full_map(1.6e9)))
    again = ask(run_dir, client, **{"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.json()["timestamp"]) == (200, 1.6e9)


def test_ended_requests_are_removed(run_dir: Path, client: httpx.Client) -> None:
    """Also those that an exporter has left which was killed."""
    rank(run_dir)
    ask(run_dir, client)
    (request,) = requests(run_dir)
    old = request.with_name("1-2-3")
    old.touch()
    os.utime(old, (time.time() - LEASE_SECONDS - 1,) * 2)
    other = Published(
        own_sample(), 1, "running", True, uid=os.geteuid(), path="0/7-8-9.sample.json"
    )
    Requests(run_dir).touch(other, time.time())
    assert {request.name, "7-8-9"} == {path.name for path in requests(run_dir)}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"memory_map": False}, 409, "turned the map off"),
        ({"memory_map": None}, 409, "older torchmem"),
        ({"ended": "exited"}, 404, "ended without a map"),
    ],
)
def test_what_stands_in_the_place_of_a_map(
    run_dir: Path, client: httpx.Client, changes: dict[str, Any], status: int, words: str
) -> None:
    """One sentence says why there is none, and the rank is not asked."""
    publish(run_dir, replace(own_sample(memory_map=True), **changes))
    answer = ask(run_dir, client)
    assert status == answer.status_code
    assert words in answer.json()["error"]
    assert requests(run_dir) == []


def test_a_dead_rank_keeps_its_map(run_dir: Path, client: httpx.Client) -> None:
    """Until its time to live ends."""
    replace_file(rank(run_dir, ended="oom"), encode(full_map()))
    assert (ask(run_dir, client).status_code, requests(run_dir)) == (200, [])


def test_an_unknown_id(client: httpx.Client) -> None:
    """It is 404 with a sentence, also without an id."""
    for path in ("/api/v1/map", "/api/v1/map?id=0000000000000000", "/api/v1/map?id=../.."):
        answer = client.get(path)
        assert (answer.status_code, "error" in answer.json()) == (404, True)


def test_looking_at_the_head_does_not_ask(run_dir: Path, client: httpx.Client) -> None:
    """Only GET asks the rank."""
    rank(run_dir)
    client.get("/metrics")
    assert client.head("/api/v1/map", params={"id": ids(run_dir)[0]}).status_code == 202
    assert requests(run_dir) == []


def _status(url: str, id_: str) -> tuple[int, str]:
    """Ask without an HTTP client, which imports modules that another user may not read."""
    head = f"GET /api/v1/map?id={id_} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = raw_http.ask(url, head.encode())
    return raw_http.status(answer), answer.decode()


@needs_root
@pytest.mark.parametrize(("visitor", "status"), [(1000, 200), (1001, 403), (0, 200)])
def test_who_may_see_a_map(
    run_dir: Path, server: ExporterServer, client: httpx.Client, visitor: int, status: int
) -> None:
    """On the node, the rank's own user and root; another user learns nothing and asks nothing."""

    def publish_all() -> None:
        ended = replace(own_process(), start_ticks=1)
        replace_file(rank(run_dir, process=ended, ended="oom"), encode(full_map()))

    as_user(1000, publish_all)
    client.get("/metrics")
    (id_,) = ids(run_dir)
    code, text = as_user(visitor, lambda: _status(server.url, id_))
    assert status == code
    assert ("sizes" in text) == (status == 200)
    assert ("user 1000 and root" in text) == (status == 403)


def test_a_page_of_another_site_may_not_look(run_dir: Path, client: httpx.Client) -> None:
    """A browser says so, and the rank is not asked."""
    rank(run_dir)
    assert ask(run_dir, client, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert ask(run_dir, client, Host="rebound.example").status_code == 403
    assert requests(run_dir) == []


def test_from_the_sdk_to_the_browser(run_dir: Path, client: httpx.Client) -> None:
    """A real session sees the request of a real exporter, and its map shows the allocator."""
    allocator = DeviceCachingAllocator(SimulatedGpu(1 << 30, context_bytes=0, uuid=UUID))
    blocks = [allocator.malloc(3 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    with sdk.instrument(
        backend=SimulatedBackend([allocator]),
        run_dir=run_dir,
        interval=0.02,
        snapshot_interval=0.02,
    ) as session:
        session.step()
        until(lambda: ids(run_dir))
        until(lambda: ask(run_dir, client).status_code == 200)
        (device,) = ask(run_dir, client).json()["devices"]

    expected = map_of(allocator.memory_snapshot(), UUID).devices[0]
    assert json.loads(json.dumps([s.sizes for s in expected.segments])) == [
        segment["sizes"] for segment in device["segments"]
    ]
    assert expected.layout.stranded_bytes == device["layout"]["stranded_bytes"]


@settings(max_examples=40, deadline=None)
@given(segments())
def test_a_map_survives_the_exporter(found: list[SegmentInfo]) -> None:
    """What the SDK writes is what a browser gets."""
    memory_map = map_of(found, timestamp=NOW - 1)
    assert memory_map == decode(checked(encode(memory_map), NOW))


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(gzip.decompress(encode(full_map())))
    change(content)
    return gzip.compress(json.dumps(content).encode())


def _first(content: dict[str, Any]) -> dict[str, Any]:
    segment: dict[str, Any] = content["devices"][0]["segments"][0]
    return segment


HOSTILE = {
    "not compressed": b"{}",
    "empty": b"",
    "cut": encode(full_map())[:-9],
    "with something behind it": encode(full_map()) + b"x",
    "two members": encode(full_map()) * 2,
    "a bomb": gzip.compress(b" " * (MAX_JSON_BYTES + 1)),
    "nested": gzip.compress(b"[" * 100_000),
    "another schema": _changed(lambda m: m.update(schema=2)),
    "a string as size": _changed(lambda m: _first(m)["sizes"].__setitem__(0, "1")),
    "no size": _changed(lambda m: _first(m)["sizes"].__setitem__(0, 0)),
    "a negative size": _changed(lambda m: _first(m)["sizes"].__setitem__(0, -512)),
    "an inexact size": _changed(lambda m: _first(m)["sizes"].__setitem__(0, 1 << 53)),
    "a huge number": _changed(lambda m: _first(m)["sizes"].__setitem__(0, 1 << 70)),
    "too many states": _changed(lambda m: _first(m).update(states="aaaaaaaa")),
    "markup as states": _changed(lambda m: _first(m).update(states="<b>")),
    "no blocks": _changed(lambda m: _first(m).update(states="", sizes=[])),
    "a negative address": _changed(lambda m: _first(m).update(address=-1)),
    "another pool": _changed(lambda m: _first(m).update(pool="<script>")),
    "no page": _changed(lambda m: m["devices"][0].update(large_page_bytes=0)),
    "too many blocks": _changed(
        lambda m: _first(m).update(states="a" * (MAX_BLOCKS + 1), sizes=[1] * (MAX_BLOCKS + 1))
    ),
    "too many devices": _changed(lambda m: m.update(devices=m["devices"] * 65)),
    "negative bytes": _changed(lambda m: m["devices"][0]["layout"].update(stranded_bytes=-1)),
    "another histogram": _changed(lambda m: m["devices"][0]["layout"].update(free_block_counts=[])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_map_is_refused(name: str) -> None:
    """With one sentence, whatever is wrong with it."""
    with pytest.raises(ValueError, match=r"^[A-Z].*\.$"):
        checked(HOSTILE[name], NOW)


def empty_segments(count: int) -> bytes:
    """A map that is valid but for its number of segments without blocks."""
    content = json.loads(gzip.decompress(encode(full_map())))
    empty = {**_first(content), "sizes": [], "states": ""}
    content["devices"][0]["segments"] = [empty] * count
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode())


def long_list(count: int) -> bytes:
    """A map with a list of numbers in place of a string."""
    text = json.dumps(json.loads(gzip.decompress(encode(full_map()))))
    return gzip.compress(text.replace('"uuid": "', f'"uuid": [{"0," * count}0], "x": "').encode())


@pytest.mark.parametrize(
    "bomb",
    [
        lambda: empty_segments(MAX_OBJECTS),
        lambda: long_list(MAX_COMMAS),
        lambda: gzip.compress(b"[" * MAX_JSON_BYTES),
        lambda: gzip.compress(b'{"timestamp":1,"devices":"' + b"x" * MAX_JSON_BYTES),
        lambda: gzip.compress(bytes(MAX_JSON_BYTES - 1)),
    ],
)
def test_a_bomb_is_refused_before_it_is_decoded(bomb: Callable[[], bytes]) -> None:
    """What expands a thousandfold, as text or as objects, takes little more than its text."""
    data = bomb()
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^[A-Z].*\.$"):
        checked(data, NOW)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < MAX_JSON_BYTES + (8 << 20)


def test_a_refused_map_is_read_once(run_dir: Path) -> None:
    """Whoever asks again gets the same sentence, until the file changes."""
    path, reads = rank(run_dir), list[bytes]()

    def refuse(data: bytes, _: float) -> bytes:
        reads.append(data)
        raise ValueError("The map is too large.")

    files = MapFiles(run_dir, refuse)
    (published,) = RunDirectory(run_dir).read(time.time())
    for content in (b"one", b"two"):
        replace_file(path, content)
        for _ in range(3):
            with pytest.raises(ValueError, match="too large"):
                files.read(published, NOW)

    assert reads == [b"one", b"two"]


def test_a_time_in_the_future_is_now() -> None:
    """And text that controls a terminal is made printable."""

    def change(content: dict[str, Any]) -> None:
        content.update(timestamp=1e18)
        content["devices"][0]["uuid"] = "GPU\x1b[31m"

    found = decode(checked(_changed(change), NOW))
    assert (found.timestamp, found.devices[0].uuid) == (NOW, "GPU\ufffd[31m")


@pytest.mark.parametrize("kind", ["hostile", "huge", "link", "FIFO", "directory"])
def test_a_file_that_is_no_map_costs_only_its_own_user(
    run_dir: Path, client: httpx.Client, kind: str
) -> None:
    """The answer is a sentence, nothing is followed or waited for, and the metrics are complete."""
    path = rank(run_dir)
    if kind == "hostile":
        path.write_bytes(HOSTILE["a bomb"])
    elif kind == "huge":
        path.write_bytes(b"x" * (MAX_MAP_BYTES + 1))
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()
    answer = ask(run_dir, client)
    assert (answer.status_code, answer.json()["error"].endswith(".")) == (409, True)
    assert "torchmem_allocated_bytes" in client.get("/metrics").text
