"""A process that serves /metrics, scraped as Prometheus scrapes, and its cost."""

from __future__ import annotations

import gzip
import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# What Prometheus 3 sends (scrape/scrape.go), without the formats that Python exporters lack.
HEADERS = {
    "Accept": (
        "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    ),
    "Accept-Encoding": "gzip",
}
TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
_CPUCLOCK_SCHED = 2  # include/linux/posix-timers_types.h


@dataclass(frozen=True, slots=True)
class Answer:
    """One scrape: wall seconds until the last byte, bytes received, and the text."""

    seconds: float
    wire_bytes: int
    text: str

    @property
    def series(self) -> int:
        """Number of series."""
        return sum(1 for line in self.text.splitlines() if line and not line.startswith("#"))


class Server:
    """A running exporter, scraped over one connection, as Prometheus does."""

    def __init__(self, popen: subprocess.Popen[bytes], port: int) -> None:
        self._process = psutil.Process(popen.pid)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    def scrape(self, accept: str = HEADERS["Accept"], timeout_seconds: int = 10) -> Answer:
        """Scrape once, as a Prometheus server with this scrape timeout does."""
        headers = HEADERS | {"Accept": accept, TIMEOUT_HEADER: str(timeout_seconds)}
        start = time.perf_counter()
        try:
            answer, body = self._get(headers)
        except (
            http.client.RemoteDisconnected,
            ConnectionError,
        ):  # it has closed the idle connection
            self._connection.close()
            answer, body = self._get(headers)
        seconds = time.perf_counter() - start
        assert answer.status == 200, body[:200]
        text = gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body
        return Answer(seconds, len(body), text.decode())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _get(self, headers: Mapping[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
        self._connection.request("GET", "/metrics", headers=headers)
        answer = self._connection.getresponse()
        return answer, answer.read()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all threads since the start, those that have ended included.

        Source: the CPU-time clock of the process, whose number clock_getcpuclockid(3) makes of its
        pid. It is the time in /proc/PID/stat, in nanoseconds instead of ticks of 10 ms.
        """
        return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)

    @property
    def is_running(self) -> bool:
        """Whether one of its threads runs or waits for a processor."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                if (task / "stat").read_text().rpartition(") ")[2].startswith("R"):
                    return True
        return False

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(self._process.memory_info().rss)


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
    """Run `command`, with a free port in place of the word PORT, until the block ends."""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        words = [word.replace("PORT", str(port)) for word in command]
        popen = subprocess.Popen(
            words, env=dict(environment), stdout=log, stderr=log, cwd=Path(__file__).parents[2]
        )
        try:
            if not _listens(popen, port):
                log.seek(0)
                sys.exit(f"{command[0]} did not start:\n{log.read().decode()}")
            with closing(Server(popen, port)) as server:
                yield server
        finally:
            popen.terminate()
            try:
                popen.wait(10)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()


def _free_port() -> int:
    """Return a port that the kernel assigns to no other process until the server has started."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            listener.accept()[0].close()  # this side closes first: the port is in TIME_WAIT
        return int(address[1])


def _listens(popen: subprocess.Popen[bytes], port: int) -> bool:
    for _ in range(6000):
        if popen.poll() is not None:
            return False
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    return False
