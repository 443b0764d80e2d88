"""Strangers on the port: slow, greedy, many or malformed, they cost little and keep nobody else from being served."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from support.raw_http import ask, connect, everything, status
from support.waiting import until

from torchmem.exporter.run_directory import Published
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.web.connections import Limits

LONG = 600.0
GET = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"\r\nConnection: close\r\n\r\n"
Open = Callable[..., ExporterServer]


class Families:
    """A collector of one family with `series` series."""

    def __init__(self, series: int = 1) -> None:
        self._series = series

    def collect(self) -> list[Metric]:
        """The family."""
        family = GaugeMetricFamily("something", "Numbers.", labels=["number"])
        for number in range(self._series):
            family.add_metric([str(number)], number)
        return [family]

    def known(self) -> list[Metric]:
        """The same."""
        return self.collect()

    def published(self) -> list[Published]:
        """No process."""
        return []


@pytest.fixture
def open_server() -> Iterator[Open]:
    """Serves a small collector within given limits."""
    with ExitStack() as stack:

        def open_one(series: int = 1, **limits: float) -> ExporterServer:
            server = serve(Families(series), limits=Limits(**({"sweep_seconds": 0.05} | limits)))  # type: ignore[arg-type]
            stack.callback(server.close)
            return server

        yield open_one


def is_served(server: ExporterServer) -> bool:
    """Whether somebody else is served now."""
    return status(ask(server.url, GET)) == 200


@pytest.mark.parametrize(
    "begun", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "]
)
def test_slow_head_is_ended(open_server: Open, begun: bytes) -> None:
    """Who does not finish asking is cut off without an answer, however far the question came."""
    with connect(open_server(head_seconds=0.2).url) as client:
        client.sendall(begun)

        assert b"" == everything(client)


def test_head_that_trickles_on_a_used_connection_is_ended(open_server: Open) -> None:
    """A first good request buys no more time for the second one, and single bytes do not restart the clock."""
    with connect(open_server(head_seconds=2.0).url) as client:
        client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        client.sendall(b"G")

        assert 1 == everything(client).count(b"HTTP/1.1 ")


def test_idle_connection_is_ended(open_server: Open) -> None:
    """A connection that asks nothing more does not stay for ever."""
    with connect(open_server(idle_seconds=0.2).url) as client:
        client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")

        assert everything(client).endswith(b"Healthy.\n")


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"a" * (1 << 20),
        b"\r\n".join(b"X-%d: a" % n for n in range(100_000)),
        b"a" * (1 << 20),
    ],
)
def test_huge_head_is_refused(open_server: Open, head: bytes) -> None:
    """Headers beyond the bound are refused or cut off, and others go on."""
    server = open_server()

    assert status(ask(server.url, b"GET / HTTP/1.1\r\nHost: x\r\n" + head)) in {0, 400, 431}
    assert is_served(server)


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
def test_only_plain_questions(
    open_server: Open, request_line: bytes, headers: bytes, expected: int
) -> None:
    """GET and HEAD without a body on a known path are answered; the rest is refused without waiting for a body."""
    server = open_server()
    answer = ask(
        server.url, request_line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers
    )

    assert expected == status(answer)
    assert is_served(server)


def test_head_has_no_body(open_server: Open) -> None:
    """HEAD tells the length that GET would have and sends nothing."""
    head, _, body = ask(
        open_server().url, GET_METRICS.replace(b"GET", b"HEAD").replace(b"\r\n\r\n", CLOSE)
    ).partition(b"\r\n\r\n")

    assert b"content-length: " in head.lower()
    assert b"" == body


def test_flood_of_idle_connections_lets_others_in(open_server: Open) -> None:
    """However many connections are held open, the next client is served, and their number stays bounded."""
    server = open_server(connections=8, head_seconds=LONG)
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server.url)) for _ in range(40)]
        served = is_served(server)
        ended = [client for client in held if _is_ended(client)]

        assert served
        assert len(held) - len(ended) <= 8


def _is_ended(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_client_that_does_not_read_is_ended(open_server: Open) -> None:
    """An answer that nobody takes is thrown away after a while, not kept for ever."""
    server = open_server(series=300_000, unsent_seconds=0.2, idle_seconds=LONG)
    with connect(server.url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(GET_METRICS)
        until(lambda: _has_been_reset(client))

    assert is_served(server)


def _has_been_reset(client: socket.socket) -> bool:
    """Whether the server gave up; asking again on a connection that is gone fails."""
    try:
        client.send(b"\r\n")
    except OSError:
        return True
    return False


def test_answers_that_nobody_reads_have_bounded_memory(open_server: Open) -> None:
    """Of many clients that do not read, the oldest go when their answers together are too large."""
    server = open_server(
        series=300_000, unsent_bytes=8 << 20, unsent_seconds=LONG, idle_seconds=LONG
    )
    with ExitStack() as stack:
        greedy = [stack.enter_context(connect(server.url)) for _ in range(6)]
        for client in greedy:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(GET_METRICS)
        until(lambda: sum(_has_been_reset(client) for client in greedy) >= 3)

        assert is_served(server)


def test_many_requests_at_once_on_one_connection(open_server: Open) -> None:
    """Pipelined requests are answered one after the other."""
    answer = ask(open_server().url, GET_METRICS * 50 + GET)

    assert 51 == answer.count(b"HTTP/1.1 200 OK")


def test_one_client_cannot_take_all_places(open_server: Open) -> None:
    """A client that scrapes without pause on many connections leaves places to one with another address."""
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

        assert 200 == status(everything(other))


def test_limits_do_not_end_what_is_being_answered(open_server: Open) -> None:
    """Twenty scrapes one after the other on one connection pass within the tightest head limit."""
    server = open_server(head_seconds=5.0)
    with connect(server.url) as client:
        for _ in range(20):
            client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"Healthy.\n"):
                received += client.recv(4096)
        client.sendall(GET)

        assert 200 == status(everything(client))
