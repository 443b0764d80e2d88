"""The HTTP endpoint inside training: what Prometheus gets, and what hostile clients do not."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPResponse
from itertools import count

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from support.descriptors import open_descriptors
from support.threads import ENDPOINT, thread_names
from support.waiting import until

from torchmem.sdk.publish.descriptors import OwnSocket
from torchmem.sdk.publish.endpoint import MAX_CONNECTIONS, MAX_REQUEST_BYTES, Endpoint
from torchmem.sdk.publish.page import Page
from torchmem.sdk.safety.errors import Errors

IDLE_CLIENTS = 300
SERIES = 20_000


class Counting(Collector):
    """One series with the number of collections, and more of them on request."""

    def __init__(self, series: int = 0, *, is_broken: bool = False) -> None:
        self.calls = 0
        self.is_broken = is_broken
        self._series = series

    def collect(self) -> Iterable[Metric]:
        """Return the series."""
        self.calls += 1
        if self.is_broken:
            raise ValueError("broken")
        yield GaugeMetricFamily("collections", "Collections.", value=self.calls)
        if self._series:
            more = GaugeMetricFamily("more", "More.", labels=["number"])
            for number in range(self._series):
                more.add_metric([str(number)], number)
            yield more


def page_of(collector: Counting, clock: Callable[[], float] | None = None) -> Page:
    """Return a page of that collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    collector.calls = 0
    return Page(registry, clock) if clock else Page(registry)


Opener = Callable[..., Endpoint]


@pytest.fixture
def errors() -> Errors:
    """Counts what the endpoint suppresses."""
    return Errors()


@pytest.fixture
def serve(errors: Errors) -> Iterator[Opener]:
    """Opens endpoints and closes them at the end."""
    opened: list[Endpoint] = []

    def open_one(page: Page | None = None, address: str = "127.0.0.1") -> Endpoint:
        opened.append(Endpoint.listen(0, address, page or page_of(Counting()), errors))
        return opened[-1]

    yield open_one
    for endpoint in opened:
        endpoint.close()


def port_of(endpoint: Endpoint) -> int:
    """Return the port that it listens on."""
    return int(endpoint.url.rpartition(":")[2].partition("/")[0])


def ask(
    endpoint: Endpoint, method: str = "GET", path: str = "/metrics", **headers: str
) -> tuple[HTTPResponse, bytes]:
    """Return the answer to one request and its body."""
    connection = HTTPConnection("127.0.0.1", port_of(endpoint), timeout=30)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=fields)
    response = connection.getresponse()
    return response, response.read()


def test_text_or_openmetrics_by_the_accept_header(serve: Opener) -> None:
    """Prometheus gets OpenMetrics, and a client that does not name it gets text."""
    endpoint = serve()
    named = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"

    text, body = ask(endpoint)
    assert text.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"collections 1.0" in body
    openmetrics, body = ask(endpoint, Accept=named)
    assert openmetrics.headers["Content-Type"].startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    assert body.endswith(b"# EOF\n")
    old, _ = ask(endpoint, Accept="application/openmetrics-text;version=0.0.1")
    assert old.headers["Content-Type"].startswith("text/plain")


def test_head_gzip_and_other_paths(serve: Opener) -> None:
    """HEAD has the length without the body; gzip is the same page; other paths are not found."""
    endpoint = serve()
    _, body = ask(endpoint)
    head, nothing = ask(endpoint, "HEAD")
    packed, compressed = ask(endpoint, Accept_Encoding="gzip, deflate")

    assert (200, len(body), b"") == (head.status, int(head.headers["Content-Length"]), nothing)
    assert packed.headers["Content-Encoding"] == "gzip"
    assert body == gzip.decompress(compressed)
    assert ask(endpoint, path="/favicon.ico")[0].status == 404
    assert ask(endpoint, "POST")[0].status == 405
    assert ask(endpoint, path="/?name[]=more")[0].status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"\x80 \xff \x00\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST_BYTES, b"431"),
        (b"GET / HTTP/1.1\r\nno colon\r\nAccept: application/openmetrics-text;q\r\n\r\n", b"200"),
    ],
)
def test_a_malformed_request_gets_an_answer(
    serve: Opener, errors: Errors, request_bytes: bytes, status: bytes
) -> None:
    """Each request gets one status line, and none is an error of the SDK."""
    with socket.create_connection(("127.0.0.1", port_of(serve())), 30) as client:
        client.sendall(request_bytes)
        assert client.recv(12).split()[1] == status
    assert errors.counts["endpoint"] == 0


def test_a_request_may_come_in_pieces(serve: Opener) -> None:
    """A client that sends byte by byte is served."""
    with socket.create_connection(("127.0.0.1", port_of(serve())), 30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET / HTTP/1.1\r\n\r\n":
            client.sendall(bytes([byte]))
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_an_ipv6_address(serve: Opener) -> None:
    """An IPv6 address is served, and is in brackets in the URL."""
    endpoint = serve(address="::1")

    assert endpoint.url.startswith("http://[::1]:")
    with socket.create_connection(("::1", port_of(endpoint)), 30) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_requests_share_one_rendered_page() -> None:
    """Each format is rendered once a second at most, however many requests come."""
    collector, now = Counting(), [0.0]
    page = page_of(collector, lambda: now[0])
    for _ in range(100):
        page.body(openmetrics=True, compressed=True)
        page.body(openmetrics=True, compressed=False)
    assert collector.calls == 1
    page.body(openmetrics=False, compressed=True)
    assert collector.calls == 2
    now[0] = 11.0
    assert b"collections 3.0" in page.body(openmetrics=False, compressed=False)


def test_an_error_is_answered_and_the_next_scrape_works(serve: Opener, errors: Errors) -> None:
    """If rendering fails, the client gets status 500, and the error is counted."""
    collector = Counting()
    ticks = count(step=100)
    endpoint = serve(page_of(collector, lambda: float(next(ticks))))
    collector.is_broken = True

    assert ask(endpoint)[0].status == 500
    assert errors.counts["endpoint"] == 1
    collector.is_broken = False
    assert ask(endpoint)[0].status == 200


def test_clients_that_do_not_read_do_not_keep_others_out(serve: Opener) -> None:
    """With more slow readers than connections, a scrape gets its whole page."""
    endpoint = serve(page_of(Counting(SERIES)))
    slow = [socket.socket() for _ in range(2 * MAX_CONNECTIONS)]
    for client in slow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", port_of(endpoint)))
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert b'more{number="%d"}' % (SERIES - 1) in ask(endpoint)[1]
    for client in slow:
        client.close()


def test_a_connection_has_a_deadline(errors: Errors) -> None:
    """A client that sends nothing is cut, also if no other one connects."""
    endpoint = Endpoint.listen(0, "127.0.0.1", page_of(Counting()), errors, deadline=0.1)
    with closing(endpoint), socket.create_connection(("127.0.0.1", port_of(endpoint)), 30) as idle:
        assert idle.recv(1) == b""


def test_a_closed_endpoint_frees_its_port(errors: Errors) -> None:
    """`close` ends the thread, closes the descriptors and frees the port."""
    before = open_descriptors()
    endpoint = Endpoint.listen(0, "127.0.0.1", page_of(Counting()), errors)
    with socket.create_connection(("127.0.0.1", port_of(endpoint)), 30) as idle:
        until(lambda: open_descriptors() == before + 3)
        endpoint.close()
        with suppress(ConnectionResetError):  # if it was closed before it was accepted
            assert idle.recv(1) == b""

    until(lambda: ENDPOINT not in thread_names())  # `close` does not wait long for it
    assert before == open_descriptors()
    socket.create_server(("127.0.0.1", port_of(endpoint))).close()


def test_idle_clients_take_neither_descriptors_nor_threads(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """With 300 idle connections, a script limited to 64 descriptors opens files and is scraped."""
    done = run_script(f"""
import resource, subprocess, urllib.request
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
session = sdk.instrument(backend=backend, port=0, interval=0.01)
backend.step()
while not session.url: time.sleep(0.01)
client = subprocess.Popen([sys.executable, "-c", '''
import resource, socket, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address = "127.0.0.1", int(sys.argv[1])
clients = [socket.socket() for _ in range({IDLE_CLIENTS})]
for client in clients:
    client.setblocking(False)
    client.connect_ex(address)
print("connected", flush=True)
sys.stdin.read()
''', session.url.split(":")[2].split("/")[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
client.stdout.readline()
for _ in range(20):
    assert len(os.listdir("/proc/self/task")) == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors + {MAX_CONNECTIONS} + 4
    [open("/proc/self/stat") for _ in range(20)].clear()
    time.sleep(0.02)
assert b"torchmem_process_info" in urllib.request.urlopen(session.url, timeout=50).read()
client.stdin.close()
client.wait()
session.close()
print("scraped", session.errors.counts["endpoint"])
""")

    assert (done.stdout, done.stderr) == ("scraped 0\n", "")


def test_a_script_that_closes_all_descriptors_keeps_its_own(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """After `os.closerange`, files and servers of the script with the same numbers stay theirs.

    The endpoint neither accepts their connections nor closes them, and serves again.
    """
    done = run_script("""
import socket, urllib.request
session = sdk.instrument(backend=backend, port=0, interval=2)
backend.step()
while not session.url: time.sleep(0.01)
old = session.url
time.sleep(0.5)  # between two publications: a file that is being written would be closed twice
os.closerange(3, 100)
mine = [socket.create_server(("127.0.0.1", 0)) for _ in range(10)]
files = [open("/proc/self/stat") for _ in range(10)]
for server in mine:
    server.settimeout(30)
    with socket.create_connection(server.getsockname()):
        time.sleep(0.02)
        server.accept()[0].close()
host, port = old.split("/")[2].split(":")
try:
    socket.create_connection((host, int(port)), 1).close()  # ends the wait on the old socket
except OSError:
    pass
def serves():
    url = session.url  # None until it serves again
    try:
        return url and b"torchmem_process_info" in urllib.request.urlopen(url, timeout=30).read()
    except OSError:
        return False
while not serves(): time.sleep(0.01)
session.close()
for own in mine + files:
    os.fstat(own.fileno())
print("kept")
""")

    assert (done.stdout, done.stderr) == ("kept\n", "")


def test_a_descriptor_whose_number_has_another_file_is_not_closed() -> None:
    """Only the socket that was open at first is closed."""
    ours = socket.socket()
    number = ours.fileno()
    kept = OwnSocket(ours)
    os.close(number)
    assert not kept.is_open
    theirs = os.open("/proc/self/stat", os.O_RDONLY)
    assert theirs == number

    kept.close()
    os.close(theirs)
