"""Clients that close their half of a connection, and clients that wait before they send a body."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.core import Metric
from support.collectors import EmptyCollector
from support.raw_http import connect, everything, status

from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.web.access import REPORT_PATH
from torchmem.exporter.web.http_protocol import MAX_BODY_BYTES

GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 \r\n\r\n"


class Gated(EmptyCollector):
    """A collector that collects when the gate is open."""

    def __init__(self) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()

    def collect(self) -> list[Metric]:
        """Return no families."""
        self.reached.set()
        assert self.gate.wait(60)
        return []


@pytest.fixture
def collector() -> Gated:
    """The collector of the server."""
    return Gated()


@pytest.fixture
def server(collector: Gated) -> Iterator[ExporterServer]:
    """A server whose collections wait for the gate."""
    with ExitStack() as stack:
        served = serve(collector)
        stack.callback(served.close)
        stack.callback(collector.gate.set)
        yield served


def head(size: int, *more: bytes) -> bytes:
    """Return the head of a POST with an OOM report of this size."""
    lines = [
        b"POST %s HTTP/1.1" % REPORT_PATH.encode(),
        b"Host: localhost",
        b"Content-Length: %d" % size,
    ]
    return b"\r\n".join([*lines, *more, b"\r\n"])


@pytest.mark.parametrize("requests", [1, 3])
def test_half_closed_connection_is_answered(
    server: ExporterServer, collector: Gated, requests: int
) -> None:
    """A client that has sent its last request may say so, as `nc -N` does; then it is closed."""
    with connect(server.url) as client:
        client.sendall(GET_METRICS * requests)
        client.shutdown(socket.SHUT_WR)
        assert collector.reached.wait(60)
        collector.gate.set()
        answers = everything(client)

    assert answers.count(b"HTTP/1.1 200 OK\r\n") == requests


def test_half_closed_connection_without_a_whole_request(server: ExporterServer) -> None:
    """A request with an incomplete head or body gets no answer, and nothing waits for the rest."""
    for request in (b"", GET_METRICS[:-2], head(100) + b"{"):
        with connect(server.url) as client:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)

            assert everything(client) == b""


def test_body_is_invited(server: ExporterServer) -> None:
    """A client that expects 100 Continue, as curl does, gets it, and then the answer."""
    with connect(server.url) as client:
        client.sendall(head(2, b"Expect: 100-continue"))
        invited = client.recv(len(CONTINUE))
        client.sendall(b"{}")
        client.shutdown(socket.SHUT_WR)

        assert invited == CONTINUE
        assert status(everything(client)) == 400


@pytest.mark.parametrize(
    ("size", "headers", "expected"),
    [
        (MAX_BODY_BYTES + 1, [], 413),
        (2, [b"Sec-Fetch-Site: cross-site"], 403),
    ],
)
def test_body_that_is_refused_is_not_invited(
    server: ExporterServer, size: int, headers: list[bytes], expected: int
) -> None:
    """The refusal comes in place of 100 Continue, and the connection ends with it."""
    with connect(server.url) as client:
        client.sendall(head(size, b"Expect: 100-continue", *headers))

        assert status(everything(client)) == expected
