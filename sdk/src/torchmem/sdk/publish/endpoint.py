"""The HTTP endpoint inside the training process: one thread, a few connections, a page that waits.

Clients may be hostile: they connect by the thousand, send nothing, or do not read. The script keeps
its descriptors and the GIL. A connection has a deadline, and at most MAX_CONNECTIONS are open: a
new one takes the place of the oldest. All others wait in the kernel. What the thread computes stays
below ENDPOINT_BUDGET, however many requests come.
"""

from __future__ import annotations

import _socket
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import cast

from torchmem.sample.native_threads import Lock, Thread, unpatched
from torchmem.sdk.publish.descriptors import OwnSocket
from torchmem.sdk.publish.page import Page, content_type, wants_openmetrics
from torchmem.sdk.safety.cost import ENDPOINT_BUDGET, MAX_ENDPOINT_PAUSE_SECONDS
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.settings import Settings

# eventlet removes `select.poll`.
select = unpatched("select")

MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8192
# Prometheus gives up a scrape after this time by default.
CONNECTION_SECONDS = 10.0
# Before it may be closed in favor of a new one: a scrape takes milliseconds.
MIN_CONNECTION_SECONDS = 0.2
# A listener that the script has closed is noticed within this time.
IDLE_SECONDS = 2.0
JOIN_SECONDS = 1.0
_BACKLOG = 128
_CHUNK_BYTES = 1 << 16

Answer = Callable[[bytes], tuple[bytes, bytes]]


class Endpoint:
    """A running HTTP server; `url` is the address that Prometheus scrapes."""

    def __init__(
        self, listener: socket.socket, address: str, page: Page, errors: Errors, deadline: float
    ) -> None:
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{listener.getsockname()[1]}/metrics"
        self._listener = OwnSocket(listener)
        self._page = page
        self._errors = errors
        self._deadline = deadline
        self._connections: list[_Connection] = []
        self._ready: set[int] = set()
        self._resumes = 0.0
        self._running = Lock()  # held until `close`
        self._running.acquire()
        self._thread = Thread(self._run, "torchmem-http")

    @classmethod
    def open(cls, settings: Settings, local_rank: int, page: Page, errors: Errors) -> Endpoint:
        """Listen on the port plus the local rank, or on any free port if that one is taken.

        Port 0 is any free port. Raises OSError if the address cannot be used at all.
        """
        port = settings.port + local_rank if settings.port else 0
        try:
            return cls.listen(port, settings.address, page, errors)
        except (OSError, OverflowError) as error:
            if port == 0:
                raise
            endpoint = cls.listen(0, settings.address, page, errors)
            errors.log_later(
                logging.WARNING,
                "torchmem: cannot listen on port %d (%s), serving %s instead",
                port,
                error,
                endpoint.url,
            )
            return endpoint

    @classmethod
    def listen(
        cls,
        port: int,
        address: str,
        page: Page,
        errors: Errors,
        *,
        deadline: float = CONNECTION_SECONDS,
    ) -> Endpoint:
        """Serve `page` on exactly this port; 0 is any free one. Raises OSError, OverflowError."""
        hints = socket.SOCK_STREAM, 0, socket.AI_PASSIVE
        family = _socket.getaddrinfo(address, None, 0, *hints)[0][0]  # no greenlet runs meanwhile
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
        endpoint = cls(listener, address, page, errors, deadline)
        endpoint._thread.start()
        return endpoint

    @property
    def is_open(self) -> bool:
        """Whether it serves; False after the script has closed its descriptor."""
        return self._listener.is_open and self._thread.is_alive()

    def close(self) -> None:
        """Stop serving."""
        if self._running.locked():
            self._running.release()
        self._listener.end()  # wakes the thread
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._is_over():
                started = time.thread_time()
                with self._errors.suppress("endpoint"):
                    self._serve(time.monotonic())
                self._rest(time.thread_time() - started)
        finally:
            self._drop(list(self._connections))
            self._listener.end()
            self._listener.close()

    def _is_over(self) -> bool:
        """Wait for work, and until the budget allows it; return whether there is none left."""
        self._ready = self._wait(time.monotonic())
        pause = max(0.0, self._resumes - time.monotonic())
        return self._running.acquire(timeout=pause) or not self._listener.is_open

    def _rest(self, spent: float) -> None:
        pause = min(spent / ENDPOINT_BUDGET, MAX_ENDPOINT_PAUSE_SECONDS)
        self._resumes = time.monotonic() + pause

    def _wait(self, now: float) -> set[int]:
        """Wait until a socket is ready or a deadline has passed; return the ready descriptors."""
        poll = select.poll()
        seconds = IDLE_SECONDS
        if self._connections:
            seconds = self._connections[0].opened + self._deadline - now
        if self._has_room(now):
            poll.register(self._listener.number, select.POLLIN)
        else:
            seconds = self._connections[0].opened + MIN_CONNECTION_SECONDS - now
        for connection in self._connections:
            poll.register(connection.socket.number, connection.awaited)
        milliseconds = 1000 * min(max(0.0, seconds), IDLE_SECONDS)
        return {number for number, _ in poll.poll(milliseconds + 1)}

    def _has_room(self, now: float) -> bool:
        """Return whether a connection can be accepted; it may replace the oldest one."""
        return (
            len(self._connections) < MAX_CONNECTIONS
            or now - self._connections[0].opened >= MIN_CONNECTION_SECONDS
        )

    def _serve(self, now: float) -> None:
        late = [each for each in self._connections if now - each.opened >= self._deadline]
        self._drop(late)
        self._advance([each for each in self._connections if each.socket.number in self._ready])
        if self._listener.number in self._ready:
            self._accept(now)

    def _accept(self, now: float) -> None:
        """Accept new connections, whose requests have mostly come with them."""
        for _ in range(MAX_CONNECTIONS):
            if not self._has_room(now):
                return
            try:
                accepted, _address = self._listener.socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._connections) == MAX_CONNECTIONS:
                self._drop(self._connections[:1])
            self._connections.append(_Connection(accepted, now))
            self._advance(self._connections[-1:])

    def _advance(self, connections: list[_Connection]) -> None:
        for connection in connections:
            try:
                is_done = connection.advance(self._answer)
            except OSError:  # the client is gone
                is_done = True
            if is_done:
                self._drop([connection])

    def _answer(self, request: bytes) -> tuple[bytes, bytes]:
        with self._errors.suppress("endpoint"):
            return _answer(request, self._page)
        return _text("500 Internal Server Error")

    def _drop(self, connections: list[_Connection]) -> None:
        for connection in connections:
            self._connections.remove(connection)
            connection.socket.end()
            connection.socket.close()


class _Connection:
    """One request and its answer."""

    def __init__(self, accepted: socket.socket, now: float) -> None:
        self.socket = OwnSocket(accepted)
        self.opened = now
        self._request = b""
        self._answer: list[memoryview] = []

    @property
    def awaited(self) -> int:
        """What `poll` waits for."""
        return cast("int", select.POLLOUT if self._answer else select.POLLIN)

    def advance(self, answer: Answer) -> bool:
        """Receive and send what is possible now; return whether the connection is done."""
        if not self.socket.is_open:
            return True
        with contextlib.suppress(BlockingIOError):
            if not self._answer and not self._receive(answer):
                return True
            while self._answer:
                self._send()
            return True
        return False

    def _receive(self, answer: Answer) -> bool:
        """Read until the request is complete and prepare the answer; False if the client ended."""
        while b"\r\n\r\n" not in self._request and len(self._request) < MAX_REQUEST_BYTES:
            received = self.socket.socket.recv(MAX_REQUEST_BYTES)
            if not received:
                return False
            self._request += received
        self._answer = [memoryview(part) for part in answer(self._request) if part]
        return True

    def _send(self) -> None:
        sent = self.socket.socket.send(self._answer[0][:_CHUNK_BYTES])
        self._answer[0] = self._answer[0][sent:]
        if not self._answer[0]:
            self._answer.pop(0)


def _answer(request: bytes, page: Page) -> tuple[bytes, bytes]:
    """Return head and body of the answer to a request."""
    head, end, _ = request.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split()
    if not end:
        return _text("431 Request Header Fields Too Large")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _text("400 Bad Request")
    method, target, _ = words
    if method not in {"GET", "HEAD"}:
        return _text("405 Method Not Allowed", "Allow: GET, HEAD")
    if target.partition("?")[0] not in {"/", "/metrics"}:
        return _text("404 Not Found")
    fields, body = _metrics(_headers(lines[1:]), page)
    return fields, b"" if method == "HEAD" else body


def _headers(lines: list[str]) -> dict[str, str]:
    fields = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip().lower() for name, _, value in fields}


def _metrics(headers: dict[str, str], page: Page) -> tuple[bytes, bytes]:
    openmetrics = wants_openmetrics(headers.get("accept", ""))
    compressed = "gzip" in headers.get("accept-encoding", "")
    body = page.body(openmetrics=openmetrics, compressed=compressed)
    encoding = ("Content-Encoding: gzip",) if compressed else ()
    kind = f"Content-Type: {content_type(openmetrics=openmetrics)}"
    return _head("200 OK", len(body), kind, "Vary: Accept, Accept-Encoding", *encoding), body


def _text(status: str, *fields: str) -> tuple[bytes, bytes]:
    body = f"{status}\n".encode()
    return _head(status, len(body), "Content-Type: text/plain", *fields), body


def _head(status: str, length: int, *fields: str) -> bytes:
    always = f"Content-Length: {length}", "Connection: close"
    return "\r\n".join([f"HTTP/1.1 {status}", *always, *fields, "", ""]).encode("latin-1")
