"""Slow, greedy, numerous or malformed clients cost little and do not block others."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from support.collectors import EmptyCollector
from support.raw_http import ask, connect, everything, status
from support.users import needs_root
from support.waiting import until

from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.web.connections import ConnectionLimits, Connections

LONG = 600.0
GET = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
GET_HEALTHY = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"\r\nConnection: close\r\n\r\n"
Open = Callable[..., ExporterServer]


class Families(EmptyCollector):
    """A collector of one family with a number of series, which it returns when the gate is open.

    `bytes_of_text`: of the help text, which is new in every collection.
    """

    def __init__(
        self, series: int = 1, gate: threading.Event | None = None, bytes_of_text: int = 0
    ) -> None:
        self._series, self._gate, self._bytes_of_text = series, gate, bytes_of_text
        self.runs = 0

    def collect(self) -> list[Metric]:
        """Return the family."""
        self.runs += 1
        assert self._gate is None or self._gate.wait(120)
        text = "Numbers." + "x" * self._bytes_of_text
        family = GaugeMetricFamily("something", text, labels=["number"])
        for number in range(self._series):
            family.add_metric([str(number)], number)
        return [family]

    def known(self) -> list[Metric]:
        """Return the same family."""
        return self.collect()


@pytest.fixture
def open_server() -> Iterator[Open]:
    """Return a function that serves a small collector with the given limits."""
    with ExitStack() as stack:

        def open_server(series: int = 1, **limits: float) -> ExporterServer:
            bounds = ConnectionLimits(**({"sweep_seconds": 0.05} | limits))  # type: ignore[arg-type]
            server = serve(Families(series), limits=bounds)
            stack.callback(server.close)
            return server

        yield open_server


def is_served(server: ExporterServer) -> bool:
    """Return whether another client is served."""
    return status(ask(server.url, GET)) == 200


@pytest.mark.parametrize(
    "start", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "]
)
def test_slow_head_is_cut_off(open_server: Open, start: bytes) -> None:
    """A client that does not finish its request head is disconnected without an answer."""
    with connect(open_server(head_seconds=0.2).url) as client:
        client.sendall(start)

        assert everything(client) == b""


def test_slow_head_on_a_used_connection_is_cut_off(open_server: Open) -> None:
    """The time limit also applies to the second request, and single bytes do not restart it."""
    with connect(open_server(head_seconds=2.0).url) as client:
        client.sendall(GET_HEALTHY)
        client.sendall(b"G")

        assert everything(client).count(b"HTTP/1.1 ") == 1


def test_idle_connection_is_closed(open_server: Open) -> None:
    """A connection without a further request is closed after a while."""
    with connect(open_server(idle_seconds=0.2).url) as client:
        client.sendall(GET_HEALTHY)

        assert everything(client).endswith(b"Healthy.\n")


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"a" * (1 << 20),
        b"\r\n".join(b"X-%d: a" % n for n in range(100_000)),
        b"a" * (1 << 20),
    ],
)
def test_huge_head_is_rejected(open_server: Open, head: bytes) -> None:
    """A head above the limit is rejected or cut off, and other clients are served."""
    server = open_server()

    assert status(ask(server.url, b"GET / HTTP/1.1\r\nHost: x\r\n" + head)) in {0, 400, 431}
    assert is_served(server)


def head_of(size: int) -> bytes:
    """Return a request head of exactly this many bytes."""
    start = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nX: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("before", [0, 1, 30])
def test_head_is_limited_to_the_byte(open_server: Open, before: int) -> None:
    """The limit holds however a head arrives, also in one piece with the requests before it."""
    limit = ConnectionLimits().head_bytes
    answers = [
        ask(open_server().url, GET_HEALTHY * before + head_of(size) + GET)
        for size in (limit, limit + 1)
    ]

    assert [(before + 2, 0), (before, 1)] == [
        (answer.count(b" 200 OK"), answer.count(b" 400 ")) for answer in answers
    ]


@pytest.mark.parametrize(
    ("request_line", "headers", "expected"),
    [
        (b"POST /metrics", b"Content-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics", b"\r\n", 405),
        (b"OPTIONS *", b"\r\n", 405),
        (b"GET /metrics", b"Content-Length: 3\r\n\r\nabc", 413),
        (b"GET /metrics", b"Transfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /metrics", b"Content-Length: 99999999999\r\n\r\n", 413),
        (b"GET /metrics", b"Content-Length: -1\r\n\r\n", 400),
        (b"GET /metrics", b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", 413),
        (b"GET /metrics", b"Content-Length: 0\r\n\r\n", 200),
        (b"GET /metrics", b"Upgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n", 200),
        (b"HEAD /metrics", b"\r\n", 200),
        (b"GET /metrics/", b"\r\n", 404),
        (b"GET /../../etc/passwd", b"\r\n", 404),
        (b"GET http://elsewhere/metrics", b"\r\n", 404),
        (b"GET /%00%ff", b"\r\n", 404),
    ],
)
def test_only_get_and_head_without_a_body(
    open_server: Open, request_line: bytes, headers: bytes, expected: int
) -> None:
    """Other requests are rejected without waiting for their body."""
    server = open_server()
    answer = ask(
        server.url, request_line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers
    )

    assert status(answer) == expected
    assert is_served(server)


def test_head_has_no_body(open_server: Open) -> None:
    """HEAD answers with the length of the body and no body."""
    head, _, body = ask(
        open_server().url, GET_METRICS.replace(b"GET", b"HEAD").replace(b"\r\n\r\n", CLOSE)
    ).partition(b"\r\n\r\n")

    assert b"content-length: " in head.lower()
    assert body == b""


def test_malformed_body(open_server: Open) -> None:
    """The connection is closed without an answer, and other clients are served."""
    server = open_server()
    answer = ask(
        server.url, b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"
    )

    assert (answer, is_served(server)) == (b"", True)


def test_a_client_of_http_1_0_gets_one_answer(open_server: Open) -> None:
    """The answer ends with the connection."""
    answer = ask(open_server().url, b"GET /-/healthy HTTP/1.0\r\n\r\n")

    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()


def test_many_idle_connections_do_not_block_others(open_server: Open) -> None:
    """The number of open connections is limited, and a new client is still served."""
    server = open_server(connections=8, head_seconds=LONG)
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server.url)) for _ in range(40)]
        assert is_served(server)
        until(lambda: sum(not _is_closed(client) for client in held) <= 8)


def _is_closed(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_client_that_does_not_read_is_disconnected(open_server: Open) -> None:
    """An answer that the client does not read is dropped after a while."""
    server = open_server(series=300_000, unsent_seconds=0.2, idle_seconds=LONG)
    with connect(server.url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(GET_METRICS)
        until(lambda: _has_been_reset(client))

    assert is_served(server)


def _has_been_reset(client: socket.socket) -> bool:
    """Return whether the server has reset the connection."""
    try:
        client.send(b"\r\n")
    except OSError:
        return True
    return False


def test_memory_of_unread_answers_is_limited() -> None:
    """When clients hold the bodies of many collections, those who hold the oldest lose theirs."""
    limits = ConnectionLimits(unsent_bytes=10 << 20, unsent_seconds=LONG, sweep_seconds=LONG)
    with (
        closing(serve(Families(bytes_of_text=4 << 20), limits=limits)) as server,
        ExitStack() as stack,
    ):
        greedy = [stack.enter_context(begin_to_read(server)) for _ in range(6)]
        newest = ask(server.url, GET_METRICS.replace(b"\r\n\r\n", CLOSE))
        until(lambda: all(_has_been_reset(client) for client in greedy[:4]))

        assert len(newest) > 4 << 20


def test_a_body_that_many_receive_counts_once() -> None:
    """Clients of the same collection do not cost each other the answer."""
    gate = threading.Event()
    limits = ConnectionLimits(unsent_bytes=5 << 20, unsent_seconds=LONG, sweep_seconds=LONG)
    collector = Families(gate=gate, bytes_of_text=4 << 20)
    with closing(serve(collector, limits=limits)) as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server.url)) for _ in range(6)]
        for client in clients:
            client.sendall(GET_METRICS.replace(b"\r\n\r\n", CLOSE))
        asked = [ask(server.url, GET) for _ in range(2)]  # now the scrapes wait
        gate.set()
        answers = [everything(client) for client in clients]

    assert list(map(status, asked)) == [200, 200]
    assert collector.runs == 1
    assert all(len(answer) > 4 << 20 for answer in answers)


def test_one_party_does_not_take_all_the_time_to_send() -> None:
    """After a burst it waits for the rest of its bytes; another party does not."""
    limits = ConnectionLimits(bytes_per_second=1 << 20)
    connections = Connections(limits, lambda: None, lambda _: asyncio.Protocol())
    greedy = [connections.delay("greedy", 1 << 20) for _ in range(4)]

    assert greedy[0] == 0.0
    assert 1.9 < greedy[3] <= 3.0
    assert connections.delay("other", 1 << 20) == 0.0


def begin_to_read(server: ExporterServer) -> socket.socket:
    """Scrape, and read nothing but the first byte of the answer."""
    client = connect(server.url)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(GET_METRICS.replace(b"\r\n\r\n", CLOSE))
    assert client.recv(1) == b"H"
    return client


def test_many_requests_at_once_on_one_connection(open_server: Open) -> None:
    """Pipelined requests are answered in order."""
    answer = ask(open_server().url, GET_METRICS * 50 + GET)

    assert answer.count(b"HTTP/1.1 200 OK") == 51


def test_one_client_cannot_take_all_concurrent_scrapes(open_server: Open) -> None:
    """A client that scrapes on many connections does not block a client at another address."""
    server = open_server(series=20_000)
    port = int(server.url.rsplit(":", 1)[1])
    with ExitStack() as stack:
        greedy = [stack.enter_context(connect(server.url)) for _ in range(40)]
        for client in greedy:
            client.sendall(GET_METRICS * 20)
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), 60, ("127.0.0.2", 0))
        )
        other.sendall(GET_METRICS.replace(b"\r\n\r\n", CLOSE))

        assert status(everything(other)) == 200


def connect_from(address: str, server: ExporterServer) -> socket.socket:
    """Open a connection from an address of the loopback network."""
    port = int(server.url.rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), 60, (address, 0))


@pytest.mark.parametrize("clients", [1, 3, 12])
def test_clients_with_many_connections_do_not_keep_others_out(clients: int) -> None:
    """However many addresses scrape on twelve connections each, another one is answered."""
    gate = threading.Event()
    collector = Families(gate=gate)
    with closing(serve(collector)) as server, ExitStack() as stack:
        stack.callback(gate.set)
        for number in range(12 * clients):
            client = stack.enter_context(connect_from(f"127.0.0.{2 + number // 12}", server))
            client.sendall(GET_METRICS * 20)
        other = stack.enter_context(connect_from("127.0.0.1", server))
        other.sendall(GET_HEALTHY + GET_METRICS.replace(b"\r\n\r\n", CLOSE))
        received = other.recv(4096)  # now the scrape starts
        gate.set()

        assert (received + everything(other)).count(b"HTTP/1.1 200 OK") == 2


@needs_root
@pytest.mark.parametrize("reads", [True, False])
def test_a_user_of_this_machine_does_not_keep_others_out(reads: bool) -> None:
    """A user who takes all connections, from the same address or from many, loses one to others."""
    gate = threading.Event()
    limits = ConnectionLimits(connections=16, unsent_seconds=LONG, sweep_seconds=LONG)
    collector = Families(gate=gate if reads else None, bytes_of_text=4 << 20)
    with closing(serve(collector, limits=limits)) as server, ExitStack() as stack:
        stack.callback(gate.set)
        for number in range(16):
            client = stack.enter_context(connect_as(61002, f"127.0.0.{1 + number % 9}", server))
            client.sendall(GET_METRICS)
            if not reads:
                client.recv(1)
        other = stack.enter_context(connect(server.url))
        other.sendall(GET_HEALTHY + GET_METRICS.replace(b"\r\n\r\n", CLOSE))
        received = other.recv(4096)  # now the scrape starts
        gate.set()

        assert (received + everything(other)).count(b"HTTP/1.1 200 OK") == 2


def connect_as(user: int, address: str, server: ExporterServer) -> socket.socket:
    """Open a connection as another user, who owns the socket."""
    os.seteuid(user)
    try:
        client = socket.socket()
    finally:
        os.seteuid(0)
    client.settimeout(60)
    client.bind((address, 0))
    client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return client


def test_limits_do_not_disconnect_a_busy_client(open_server: Open) -> None:
    """Twenty consecutive requests on one connection are answered."""
    server = open_server(head_seconds=5.0)
    with connect(server.url) as client:
        for _ in range(20):
            client.sendall(GET_HEALTHY)
            received = b""
            while not received.endswith(b"Healthy.\n"):
                received += client.recv(4096)
        client.sendall(GET)

        assert status(everything(client)) == 200
