"""Attacks by local users on a running exporter, and the honest scrapes beside them.

Users publish as much as the exporter takes of one, and the first of them has 16,300 OOM reports and
a memory map that expands a thousandfold. The attackers connect from 127.0.1.1 to 127.0.1.16, an
honest Prometheus server from 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from support import reports
from support.maps import full_map
from support.publishing import own_sample
from support.raw_http import status

from torchmem.explain.oom_report import encode as encode_report
from torchmem.node.published import Published
from torchmem.sample.memory_map import MAP_SUFFIX, MAX_JSON_BYTES
from torchmem.sample.memory_map import encode as encode_map
from torchmem.sample.run_directory import REPORT_SUFFIX, SAMPLE_SUFFIX
from torchmem.sample.sample import Process, Sample, encode

USERS = (61001, 61002)
REPORTS = 16_300
ADDRESSES = 16
CONNECTIONS = 127
TIMEOUT_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
SCRAPE = (
    b"GET /metrics HTTP/1.1\r\nHost: node5:9847\r\nAccept-Encoding: gzip\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n"
    b"X-Prometheus-Scrape-Timeout-Seconds: %d\r\nConnection: close\r\n\r\n" % TIMEOUT_SECONDS
)
GONE = Process(pid=4_000_000, pid_namespace=None, start_ticks=1, hostname="h", run="night", rank=0)
MAP = f"0-0-1{MAP_SUFFIX}"


def request(path: str, headers: str = "") -> bytes:
    """Return a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


def rank_id(user: int) -> str:
    """Return the id of the first rank of a user."""
    path = f"{user}/0-0-1{SAMPLE_SUFFIX}"
    return Published(_sample(0), 1, "exited", True, path=path).id


@dataclass(frozen=True)
class Attack:
    """What the connections of an attacker ask for, and whether they read the answers."""

    request: bytes
    reads: bool = True


def attacks() -> Mapping[str, Attack]:
    """Return all attacks by name."""
    why = f"/api/v1/rank?id={rank_id(USERS[0])}&gpu={own_sample().devices[0].uuid}"
    return {
        "unread": Attack(request("/metrics"), reads=False),
        "scrapes": Attack(request("/metrics")),
        "state": Attack(request("/api/v1/state"), reads=False),
        "rank": Attack(request(why)),
        "map": Attack(request(f"/api/v1/map?id={rank_id(USERS[0])}")),
        "sd": Attack(request("/sd")),
    }


def _sample(number: int) -> Sample:
    """Return a rank that takes much room on the page."""
    process = replace(GONE, pid=GONE.pid + number, rank=number, run="r" * 120)
    return own_sample(process=process, ended="exited", memory_map=True)


def publish(run_dir: Path, user: int) -> None:
    """Write the ranks of a user until its budget is used up, its reports and its map."""
    folder = run_dir / str(user)
    folder.mkdir(mode=0o755)
    for number in range(300):
        (folder / f"0-{number}-1{SAMPLE_SUFFIX}").write_bytes(encode(_sample(number)))
    if user == USERS[0]:
        report = encode_report(reports.STRANDED)
        for number in range(REPORTS - 300):
            (folder / f"0-0-1-{number}{REPORT_SUFFIX}").write_bytes(report)
        (folder / MAP).write_bytes(bomb())
    for path in (folder, *folder.iterdir()):
        os.chown(path, user, user)


def bomb() -> bytes:
    """Return a map of 24 MiB of JSON in 25 KB: a valid one with segments that have no blocks."""
    content = json.loads(gzip.decompress(encode_map(full_map())))
    empty = {**content["devices"][0]["segments"][0], "sizes": [], "states": ""}
    count = MAX_JSON_BYTES // (len(json.dumps(empty, separators=(",", ":"))) + 1) - 20
    content["devices"][0]["segments"] = [empty] * count
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9)


def _attack(url: str, attack: Attack) -> NoReturn:
    """Hold CONNECTIONS connections, each of which asks again and again, until killed."""
    os.setgid(USERS[0])
    os.setuid(USERS[0])
    waiting = selectors.DefaultSelector()
    sources = (f"127.0.1.{1 + number % ADDRESSES}" for number in itertools.count())
    while True:
        for _ in range(CONNECTIONS - len(waiting.get_map())):
            with contextlib.suppress(OSError):
                client = _open(url, next(sources), attack.request)
                waiting.register(client, selectors.EVENT_READ)
        for key, _ in waiting.select(_PAUSE_SECONDS):
            if not _goes_on(key.fileobj, attack):  # type: ignore[arg-type]
                waiting.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        if not attack.reads:
            time.sleep(_PAUSE_SECONDS)


def _open(url: str, source: str, sent: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((source, 0))
    client.settimeout(5)
    client.connect(("127.0.0.1", urlsplit(url).port or 0))
    client.setblocking(False)
    client.send(sent * 3)
    return client


def _goes_on(client: socket.socket, attack: Attack) -> bool:
    """Read the answers and ask again; without reading, only find out whether the end has come."""
    try:
        if not attack.reads:
            client.send(b"\r\n")
            return True
        received = client.recv(1 << 20)
        if b"HTTP/1.1 " in received:
            client.send(attack.request)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return bool(received)


def honest_scrape(url: str, timeout: float = TIMEOUT_SECONDS) -> tuple[bool, float]:
    """Scrape as Prometheus does; return whether a whole answer came in time, and its seconds."""
    begun = time.monotonic()
    received = bytearray()
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout) as client,
    ):
        client.sendall(SCRAPE)
        while chunk := client.recv(1 << 16):
            received += chunk
    seconds = time.monotonic() - begun
    return seconds <= timeout and _is_whole(bytes(received)), seconds


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    if status(head) != 200:
        return False
    try:
        return gzip.decompress(body).endswith(b"# EOF\n")
    except (OSError, EOFError):
        return False


@contextlib.contextmanager
def attackers(url: str, wanted: Iterable[Attack]) -> Iterator[None]:
    """Start a process of the first user for each attack."""
    pids = []
    for attack in wanted:
        pid = os.fork()
        if pid == 0:
            _attack(url, attack)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def peak_mib(pid: int) -> float:
    """Return the largest resident memory of a process so far, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0
