"""The server's connections, bounded in number, memory and time, and shared fairly by addresses.

A client that opens more connections than others loses its own first, so no client blocks others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from torchmem.exporter.web.tls import Tls

_log = logging.getLogger(__name__)

Phase = Literal["opening", "reading", "answering", "idle"]
_PAUSE_SECONDS = 0.1  # after accepting a connection failed
_MAX_REASONS = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the server.

    `head_bytes`: of the request line and the headers with all their line ends. `head_seconds`: from
    the first byte of a request to the end of its head; for a new connection, from its start through
    the TLS handshake to the end of the first head. `answer_seconds`: to produce an answer.
    `unsent_seconds`: for the client to receive it. `idle_seconds`: between requests.
    `unsent_bytes`: of all answers that clients have not received yet.
    """

    connections: int = 128
    head_bytes: int = 16 << 10
    head_seconds: float = 10.0
    answer_seconds: float = 60.0
    unsent_seconds: float = 30.0
    idle_seconds: float = 75.0  # above common scrape intervals, so that scrapes share a connection
    unsent_bytes: int = 64 << 20
    sweep_seconds: float = 1.0


def client_of(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address, or 64 bits of an IPv6 address.

    A host usually has a whole IPv6 network of this size, so it can choose among its addresses.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.IPv6Address(int(ip) >> 64 << 64))


class Connection:
    """One connection: its client, its phase, and since when (monotonic seconds)."""

    def __init__(self, connections: Connections, client: str, tls: Tls | None) -> None:
        self.client = client
        self.tls = tls
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self._connections = connections
        self.enter("opening")

    def enter(self, phase: Phase) -> None:
        """Start a phase."""
        self.phase, self.since = phase, time.monotonic()

    def on_data(self) -> None:
        """Note received bytes: the first bytes of a request start its clock, others do not."""
        if self.phase == "idle":
            self.enter("reading")

    def on_answer(self, *, more_received: bool) -> None:
        """Note that the answer was written; the client may not have received it yet.

        `more_received` is True when bytes of a further request have arrived already.
        """
        self.enter("reading" if more_received else "idle")
        self._connections.limit_memory()

    def on_close(self) -> None:
        """Note that the connection is closed."""
        self._connections.remove(self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not received."""
        return self.transport.get_write_buffer_size() if self.transport else 0

    def is_overdue(self, limits: Limits, now: float) -> bool:
        """Return whether the client or the answer took too long."""
        seconds = {
            "opening": limits.head_seconds,
            "reading": limits.head_seconds,
            "answering": limits.answer_seconds,
            "idle": limits.unsent_seconds if self.unsent_bytes else limits.idle_seconds,
        }[self.phase]
        if self.transport is not None and self.transport.is_closing():
            seconds = min(seconds, limits.unsent_seconds)
        return now - self.since > seconds

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()
        self.on_close()


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which reports its progress to the Connection.

    A client is refused if its certificate has no allowed name. h11 gets at most `head_bytes` at a
    time, because it limits only heads that arrive in several pieces. A request whose client has
    gone is canceled.
    """

    def __init__(
        self,
        connection: Connection,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        head_bytes: int,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._connection = connection
        self._head_bytes = head_bytes
        self._received = bytearray()
        self._application, self.app = self.app, self._answer
        self._admitted = False
        self._answers = 0
        self._answering: asyncio.Future[None] | None = None
        self._has_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Check the client's certificate after the TCP and TLS handshakes."""
        super().connection_made(transport)
        self._connection.transport = transport
        tls = self._connection.tls
        self._admitted = tls is None or tls.admits(transport.get_extra_info("peercert"))
        if not self._admitted:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request."""
        if self._admitted:
            self._connection.on_data()
            self._received += data
            self._pass_on()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        self._pass_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._connection.on_close()
        super().connection_lost(exc)
        self._has_closed = True
        if self._answering is not None:
            self._answering.cancel()

    def _pass_on(self) -> None:
        while self._received and not self.transport.is_closing():
            room = self._head_bytes - len(self.conn.trailing_data[0])
            if room <= 0:
                return
            data = bytes(self._received[:room])
            del self._received[:room]
            super().data_received(data)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection.enter("answering")
        self._answers += 1
        self._answering = asyncio.ensure_future(self._application(scope, receive, send))
        try:
            await self._answering
        except asyncio.CancelledError:
            if not self._has_closed:
                raise
        finally:
            self._answers -= 1
            if not self._answers:
                more_received = bool(self._received or self.conn.trailing_data[0])
                self._connection.on_answer(more_received=more_received)


ProtocolFactory = Callable[[Connection], asyncio.Protocol]


class Connections:
    """Accepts connections. At the limit, a new one replaces one of the client that has most.

    `tls` returns the TLS settings for a new connection, None for plain HTTP; `protocol` makes its
    protocol.
    """

    def __init__(
        self, limits: Limits, tls: Callable[[], Tls | None], protocol: ProtocolFactory
    ) -> None:
        self._limits, self._tls, self._protocol = limits, tls, protocol
        self._open: dict[Connection, None] = {}
        self._logged: set[str] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until canceled."""
        listener.setblocking(False)
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                await self._accept_safely(listener)
        finally:
            sweeping.cancel()

    def close(self) -> None:
        """Close the connections that are still in their TLS handshake."""
        for connection in [item for item in self._open if item.transport is None]:
            connection.abort()

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)

    def limit_memory(self) -> None:
        """Close connections while all unsent answers exceed the limit.

        The first is the slowest reader of the client that has the most unsent bytes.
        """
        unsent = {item: item.unsent_bytes for item in self._open if item.unsent_bytes}
        excess = sum(unsent.values()) - self._limits.unsent_bytes
        while excess > 0:
            of_client = Counter[str]()
            for item, size in unsent.items():
                of_client[item.client] += size
            slowest = min(unsent, key=lambda item: (-of_client[item.client], item.since))
            excess -= unsent.pop(slowest)
            slowest.abort()

    async def _accept_safely(self, listener: socket.socket) -> None:
        try:
            await self._accept(listener)
        except Exception:  # noqa: BLE001 - one connection's failure must not stop the server
            _log.exception("accepting a connection failed")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _accept(self, listener: socket.socket) -> None:
        await _readable(listener)
        try:
            accepted, address = listener.accept()
        except BlockingIOError:  # the client has closed the connection already
            return
        except OSError as error:  # such as EMFILE: no file descriptor is left
            self._log_once(f"cannot accept a connection: {error.strerror}")
            self._make_room(len(self._open), "")
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        client = client_of(address[0])
        if not self._make_room(self._limits.connections, client):
            accepted.close()
            return
        self._open_connection(accepted, client)

    def _open_connection(self, accepted: socket.socket, client: str) -> None:
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            # Otherwise an answer waits 40 ms for the client's delayed acknowledgment.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, client, self._tls())
        self._open[connection] = None
        connection.task = asyncio.create_task(self._start(connection, accepted))
        connection.task.add_done_callback(
            lambda task: accepted.close() if task.cancelled() else None
        )

    async def _start(self, connection: Connection, accepted: socket.socket) -> None:
        """Do the TLS handshake, if any; after it the protocol runs by itself."""
        tls = connection.tls
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._protocol(connection),
                accepted,
                ssl=tls.context if tls else None,
                ssl_handshake_timeout=self._limits.head_seconds if tls else None,
            )
        except (OSError, EOFError) as error:
            connection.on_close()
            reason = error.reason if isinstance(error, ssl.SSLError) else type(error).__name__
            self._log_once(f"a TLS handshake failed: {reason}")

    def _make_room(self, limit: int, client: str) -> bool:
        """Return whether `client` may have one more connection within `limit`, closing one for it.

        A connection that is being answered is closed only if its client would still have at least
        as many connections as the new one's.
        """
        if len(self._open) < limit:
            return True
        counts = Counter(item.client for item in self._open)
        own = counts[client]
        replaceable = [
            item
            for item in self._open
            if counts[item.client] > own + 1
            or (item.phase != "answering" and (counts[item.client] > own or item.client == client))
        ]
        if not replaceable:
            return False
        min(
            replaceable,
            key=lambda item: (-counts[item.client], item.phase == "answering", item.since),
        ).abort()
        return True

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_seconds)
            now = time.monotonic()
            for connection in [item for item in self._open if item.is_overdue(self._limits, now)]:
                connection.abort()

    def _log_once(self, reason: str) -> None:
        """Log each reason once, so that clients cannot fill the log."""
        if reason not in self._logged and len(self._logged) < _MAX_REASONS:
            self._logged.add(reason)
            _log.warning("%s (further occurrences are not logged)", reason)


async def _readable(listener: socket.socket) -> None:
    """Wait for a connection.

    `loop.sock_accept` is not used: if it is canceled while a connection arrives, it loses the
    connection and logs a traceback.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)
