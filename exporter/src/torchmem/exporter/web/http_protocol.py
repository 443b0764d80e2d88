"""HTTP/1.1 on one connection: h11 parses the requests, and an ASGI application answers them."""

from __future__ import annotations

import asyncio
import logging
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope

from torchmem.exporter.web.clients import CLIENT
from torchmem.exporter.web.connections import Connection
from torchmem.sample.run_directory import MAX_REPORT_BYTES

_log = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 10
MAX_BODY_BYTES = MAX_REPORT_BYTES
"""Of a request that has a body: an OOM report."""
_Headers = list[tuple[bytes, bytes]]


class HttpProtocol(asyncio.Protocol):
    """Answers the requests of a connection one after another, and reports its progress to it.

    A client is refused if its certificate has no allowed name. h11 gets at most `head_bytes` at a
    time, because it limits only heads that arrive in several pieces. The body of a POST reaches the
    application if it is at most MAX_BODY_BYTES long, and all others are discarded. A request whose
    client has gone is canceled.
    """

    def __init__(self, connection: Connection, app: ASGIApp, head_bytes: int) -> None:
        self._connection, self._app, self._head_bytes = connection, app, head_bytes
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes - 1)
        self._received, self._head = bytearray(), b""
        self._admitted = self._has_ended = False
        self._answering: asyncio.Task[None] | None = None
        self._body = _Body(0)
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Check the client's certificate after the TCP and TLS handshakes."""
        self._transport = self._connection.transport = transport
        transport.set_write_buffer_limits(high=_PIECE_BYTES)
        tls = self._connection.tls
        self._admitted = tls is None or tls.admits(transport.get_extra_info("peercert"))
        if not self._admitted:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request."""
        if self._admitted:
            self._connection.on_data()
            self._received += data
            self._handle_received()

    def eof_received(self) -> bool:
        """Answer the requests that have arrived: a client may close its half after the last one.

        With TLS, asyncio closes both halves together. An incomplete request gets no answer.
        """
        self._has_ended = True
        is_answered = self._answering is not None and self._body.is_whole
        return is_answered and self._connection.tls is None

    def pause_writing(self) -> None:
        """Hold back further pieces of the answer."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Continue the answer."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Handle the end of the connection."""
        self._connection.on_close()
        if self._answering is not None:
            self._answering.cancel()

    def _handle_received(self) -> None:
        """Parse until a request is to be answered first or further bytes are needed."""
        while not self._transport.is_closing():
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                self._refuse()
                return
            if isinstance(event, h11.Request):
                self._begin_answer(event)
            elif isinstance(event, h11.Data) and self._body.take(event.data):
                continue
            elif event is h11.PAUSED or (self._answering and isinstance(event, h11.Data)):
                self._transport.pause_reading()
                return
            elif isinstance(event, h11.EndOfMessage):
                self._begin_next_request()
            elif event is h11.NEED_DATA and not self._feed():
                return

    def _feed(self) -> bool:
        """Pass received bytes to h11; return False if there are none."""
        room = self._head_bytes - len(self._http.trailing_data[0])
        data = bytes(self._received[:room])
        del self._received[:room]
        if data:
            self._http.receive_data(data)
        return bool(data)

    def _begin_next_request(self) -> None:
        if (self._http.our_state, self._http.their_state) == (h11.DONE, h11.DONE):
            self._http.start_next_cycle()

    def _begin_answer(self, request: h11.Request) -> None:
        self._connection.enter("answering")
        self._body = _Body(_body_bytes(request))
        is_head = request.method == b"HEAD"
        answer = _Answer(self, self._connection, self._body, is_head=is_head)
        self._answering = asyncio.create_task(self._answer(answer, self._scope(request)))
        self._answering.add_done_callback(self._end_answer)

    async def _answer(self, answer: _Answer, scope: Scope) -> None:
        try:
            await self._app(scope, answer.receive, answer.send)
        except Exception:  # noqa: BLE001 - one answer that fails must not end the server
            _log.exception("answering %s failed", scope["raw_path"].decode("ascii"))
            if self._http.our_state is h11.SEND_RESPONSE:
                self._write_error(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _end_answer(self, _: asyncio.Task[None]) -> None:
        self._answering = None
        more_received = bool(self._received or self._http.trailing_data[0])
        self._connection.on_answer(more_received=more_received)
        if self._transport.is_closing():
            return
        if self._http.our_state is not h11.DONE or self._connection.is_last_answer:
            self._transport.close()
            return
        self._begin_next_request()
        self._transport.resume_reading()
        self._handle_received()
        if self._has_ended and self._answering is None:
            self._transport.close()

    def _refuse(self) -> None:
        """Answer a malformed request, unless an answer has begun, and close the connection."""
        if self._answering or self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self._transport.abort()
            return
        self._write_error(HTTPStatus.BAD_REQUEST)
        self._transport.close()

    def _write_error(self, status: HTTPStatus) -> None:
        text = status.phrase.encode()
        self.write_head(status, [(b"content-type", b"text/plain; charset=utf-8")], closes=True)
        self.write(h11.Data(text), h11.EndOfMessage())

    def invite_body(self) -> None:
        """Tell a client that waits before it sends the body, as curl does, to send it.

        https://www.rfc-editor.org/rfc/rfc9110#section-10.1.1
        """
        if self._http.they_are_waiting_for_100_continue:
            self.write(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[]))

    def write_head(self, status: int, headers: _Headers, *, closes: bool = False) -> None:
        """Write status and headers, together with what is written next."""
        headers = [(b"date", formatdate(usegmt=True).encode()), *headers]
        # Whether a client that has not been invited sends its body is its own choice.
        closes = closes or self._http.they_are_waiting_for_100_continue
        if closes or self._connection.is_last_answer:
            headers.append((b"connection", b"close"))
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        self._head = self._http.send(response) or b""

    def write(self, *events: h11.Event) -> None:
        """Write parts of the answer; each write is a system call."""
        data = b"".join([self._head, *(self._http.send(event) or b"" for event in events)])
        self._head = b""
        if data:
            self._transport.write(data)

    async def writable(self) -> None:
        """Wait until the client has received enough of what was written before."""
        await self._writable.wait()

    def _scope(self, request: h11.Request) -> Scope:
        path, _, query = request.target.partition(b"?")
        is_tls = self._transport.get_extra_info("sslcontext") is not None
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "server": self._address("sockname"),
            "client": self._address("peername"),
            "scheme": "https" if is_tls else "http",
            "method": request.method.decode("ascii"),
            "root_path": "",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
            CLIENT: self._connection.client,
        }

    def _address(self, name: str) -> tuple[Any, ...] | None:
        address = self._transport.get_extra_info(name)
        return tuple(address[:2]) if address else None


def _body_bytes(request: h11.Request) -> int:
    """Return the length of a body that the application may want, else 0."""
    if request.method != b"POST":
        return 0
    length = dict(request.headers).get(b"content-length", b"0")
    return int(length) if int(length) <= MAX_BODY_BYTES else 0


class _Body:
    """The body of a request, of a known length."""

    def __init__(self, size: int) -> None:
        self._size, self._content, self._whole = size, bytearray(), asyncio.Event()
        if not size:
            self._whole.set()

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self._whole.is_set()

    def take(self, data: bytes) -> bool:
        """Add bytes; return False, and add nothing, if the body is not wanted."""
        if self.is_whole:
            return False
        self._content += data
        if len(self._content) >= self._size:
            self._whole.set()
        return True

    async def content(self) -> bytes:
        """Return the body once all of it has arrived."""
        await self._whole.wait()
        return bytes(self._content)


class _Answer:
    """The answer to one request, sent in pieces.

    The head is held back until the first body, which counts as unsent from then on.
    """

    def __init__(
        self, http: HttpProtocol, connection: Connection, body: _Body, *, is_head: bool
    ) -> None:
        self._http, self._connection, self._is_head = http, connection, is_head
        self._body = body
        self._head: Message | None = None
        self._is_received = False

    async def receive(self) -> Message:
        """Return the body; after it, wait, because the end of the client cancels the task."""
        if self._is_received:
            await asyncio.get_running_loop().create_future()
        self._is_received = True
        self._http.invite_body()
        content = await self._body.content()
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Message) -> None:
        """Send the head, with the first body, or a body."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        body = b"" if self._is_head else message.get("body", b"")
        self._connection.on_body(body)
        await self._http.writable()
        if self._head is not None:
            self._http.write_head(self._head["status"], list(self._head.get("headers", ())))
            self._head = None
        await self._send_body(body)
        self._http.write(*([] if message.get("more_body", False) else [h11.EndOfMessage()]))
        self._connection.on_body_sent()

    async def _send_body(self, body: bytes) -> None:
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            if start:
                await self._connection.before_piece(len(piece))
                await self._http.writable()
            self._http.write(h11.Data(piece))
