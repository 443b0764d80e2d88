"""A running exporter with one honest rank, its run directory and its server under attack."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from support.exposition import Exposition, scrape
from support.hostile import TEXTS, Documents, hostile, json_bytes
from support.publishing import own_sample, publish
from support.raw_http import ask, everything, status
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.memory_map import CannotAskError, Requests
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.exporter.web.connections import ConnectionLimits
from torchmem.node.published import Published
from torchmem.sample.memory_map import request_directory
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import Sample, encode
from torchmem.sdk.publish.memory_map import MapPublisher

ATTACKER = 61002
"""User ID of the hostile files, if the tests run as root."""
HONEST_EVERY = 64
"""Requests between two honest scrapes."""
MAX_FILES = 6
ANSWERS = {200, 400, 404, 405, 413, 503}
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
REQUEST = (
    b"GET /metrics HTTP/1.1\r\nHost: node5:9847\r\nUser-Agent: Prometheus/3.5.0\r\n"
    b"Accept-Encoding: gzip;q=0.9\r\nAccept: application/openmetrics-text;version=1.0.0,"
    b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n"
    b"X-Prometheus-Scrape-Timeout-Seconds: 10\r\nConnection: keep-alive\r\n\r\n"
)
REQUEST_WORDS = (
    *["GET ", "HEAD ", "POST ", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    *["/metrics", "/sd", "/-/ready", "/", "?a=b"],
    *[" HTTP/1.1\r\n", " HTTP/1.0\r\n", " HTTP/9.9\r\n"],
    *["Host: x\r\n", "Content-Length: ", "Transfer-Encoding: chunked\r\n"],
    *["Expect: 100-continue\r\n", "Upgrade: h2c\r\n", "Connection: close\r\n"],
    *["Authorization: Basic Og==\r\n", "5", "-5", "\r\n", "0\r\n\r\n", "\r\n\r\n", "\0", "\xff"],
    "\x16\x03\x01\x02\x00\x01\x00",  # the begin of a TLS handshake
)


class AttackedServer:
    """A server with one rank and short time limits."""

    def __init__(self) -> None:
        self._run_dir = tempfile.TemporaryDirectory()
        publish(Path(self._run_dir.name), own_sample())
        limits = ConnectionLimits(
            connections=64, head_seconds=0.05, idle_seconds=0.05, sweep_seconds=0.02
        )
        exporter = Exporter(FakeNvml.of(), RunDirectory(Path(self._run_dir.name)))
        self.url = serve(exporter, limits=limits).url
        self._requests = itertools.count()

    def attack(self, request: bytes) -> bool:
        """Send a request in two parts; return whether it was answered with 200."""
        number = next(self._requests)
        cut = number % (len(request) + 1)
        answer = self._exchange(request[:cut], request[cut:], f"127.0.1.{1 + number % 250}")
        assert answer == b"" or status(answer) in ANSWERS, answer[:200]
        if number % HONEST_EVERY == 0:
            self.check_honest_scrape()
        return status(answer) == 200

    def check_honest_scrape(self) -> None:
        """Check that the rank is served; a client may exceed the short time limits a few times."""
        metrics = Exposition.of_text(until(self._scrape))
        assert metrics.value("torchmem_process_state", state="running") == 1.0

    def _scrape(self) -> str:
        answer = ask(self.url, SCRAPE)
        return answer.partition(b"\r\n\r\n")[2].decode() if status(answer) == 200 else ""

    def _exchange(self, first: bytes, second: bytes, source: str) -> bytes:
        port = urlsplit(self.url).port or 0
        with socket.create_connection(("127.0.0.1", port), 30.0, (source, 0)) as client:
            with contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.sendall(first)
                client.sendall(second)
            return everything(client)


@functools.cache
def _server() -> AttackedServer:
    return AttackedServer()


def http_request(content: bytes) -> bool:
    """Check that a request is answered or cut off, and that the server goes on serving."""
    return _server().attack(content)


def run_directory(content: bytes) -> bool:
    """Check that no entries of a run directory hide the rank of another user.

    The bytes are the seed of names, kinds, owners and content of the entries.
    """
    rng = random.Random(content)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        publish(run_dir, own_sample())
        for _ in range(rng.randint(1, MAX_FILES)):
            with contextlib.suppress(OSError, ValueError):  # names that Linux refuses
                _add_entry(rng, run_dir)
        metrics = scrape(Exporter(FakeNvml.of(), RunDirectory(run_dir)))
    assert metrics.value("torchmem_exporter_collector_success", collector="processes") == 1.0
    if os.geteuid() == 0:
        assert metrics.value("torchmem_process_state", rank="0", run="night", state="running") == 1
    refused = metrics.by("reason", "torchmem_exporter_rejected_samples_total")
    return not any(refused.values())


def map_requests(content: bytes) -> bool:
    """Check that nothing in the place of requests for maps speaks for another user.

    The bytes are the seed of what another user puts there. The rank is not asked, until the
    exporter asks; if that cannot ask, it says why.
    """
    rng = random.Random(content)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        run_dir.chmod(0o3777)
        sample = publish(run_dir, own_sample())
        for user in (0, os.geteuid(), ATTACKER):
            with contextlib.suppress(OSError, ValueError):
                _squat_requests(rng, request_directory(run_dir, user), sample)
        publisher = MapPublisher(sample, enabled=True)
        publisher.at_tick()
        assert os.geteuid() != 0 or not publisher.is_asked
        path = str(sample.relative_to(run_dir))
        rank = Published(own_sample(), 1, "running", True, uid=os.geteuid(), path=path)
        problem = ""
        try:
            Requests(run_dir).touch(rank, time.time())
        except CannotAskError as error:
            problem = str(error)
        assert problem.isprintable(), problem
        if problem:
            return False
        publisher.at_tick()
        assert publisher.is_asked
    return True


def _squat_requests(rng: random.Random, taken: Path, sample: Path) -> None:
    """Put a directory with anything in it, or something that is none, in the place of requests."""
    if rng.random() < 0.7:
        taken.mkdir()
        name = rng.choice((sample.name.removesuffix(SAMPLE_SUFFIX), *TEXTS)).replace("/", "_")
        _make(rng, taken / name)
        _give_away(taken / name)
        taken.chmod(rng.choice((0o700, 0o755, 0o777, 0o000)))
    else:
        _make(rng, taken)
    _give_away(taken)


@functools.cache
def _sample() -> Sample:
    process = replace(own_sample().process, rank=1, run="other")
    return own_sample(process=process)


@functools.cache
def _documents() -> Documents:
    import json

    return Documents([json.loads(encode(_sample()))], json_bytes)


def _add_entry(rng: random.Random, run_dir: Path) -> None:
    folder = run_dir / rng.choice((str(ATTACKER), f"{ATTACKER}-{'a' * 16}", "7", "", "x", "-1"))
    if folder != run_dir:
        folder.mkdir(exist_ok=True)
        folder.chmod(rng.choice((0o700, 0o755, 0o777, 0o000)))
        _give_away(folder)
    name = rng.choice((*TEXTS, f"0-{rng.randrange(9999)}-1")).replace("/", "_")
    path = folder / f"{name}{SAMPLE_SUFFIX}"
    _make(rng, path)
    _give_away(path)


def _make(rng: random.Random, path: Path) -> None:
    """Create a file, or something that is none."""
    kind = rng.random()
    if kind < 0.6:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, rng.choice((0o644, 0o600, 0o000))), "wb") as file:
            file.write(hostile(rng, [encode(_sample())], (), _documents()))
            moment = rng.choice((0.0, time.time(), 4e9))
            os.utime(file.fileno(), (moment, moment))
    elif kind < 0.8:
        path.symlink_to(rng.choice(("/dev/zero", path.name, "..", f"../{os.geteuid()}")))
    else:
        rng.choice((os.mkfifo, os.mkdir, _socket))(path)


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o666)


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, ATTACKER, ATTACKER, follow_symlinks=False)
