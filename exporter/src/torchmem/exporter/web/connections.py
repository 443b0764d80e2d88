"""The server's connections, bounded in number, memory and time, and shared fairly by clients.

A client that opens more connections than others loses its own first, so no client blocks others. An
answer is sent in pieces, each after the client has received those before it, so a connection holds
one piece and a reference to the body, which all clients of one collection share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmem.exporter.web.clients import Client
from torchmem.exporter.web.tls import Tls

_log = logging.getLogger(__name__)

Phase = Literal["opening", "reading", "answering", "sending", "idle"]
_OWN_DESCRIPTORS = 48
"""File descriptors that connections leave to the exporter: 10 without a driver, some for each GPU,
and 4 while it reads the run directory."""
_MIN_CONNECTIONS = 8
_PAUSE_SECONDS = 0.1  # after accepting a connection failed
_CLOSE_POLL_SECONDS = 0.05
_MAX_REASONS = 32
BURST_SECONDS = 0.5  # 32 MiB: two of the largest pages
_SOCKET_BYTES = ((socket.SO_SNDBUF, 128 << 10), (socket.SO_RCVBUF, 32 << 10))
"""The kernel's buffers of a connection. By default they grow to several MiB each, which count as
memory of the exporter's control group."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of the server.

    `head_bytes`: of the request line and the headers with all their line ends. `head_seconds`: from
    the first byte of a request to the end of its head; for a new connection, from its start through
    the TLS handshake to the end of the first head. `answer_seconds`: to produce an answer.
    `unsent_seconds`: for the client to receive it. `idle_seconds`: between requests.
    `unsent_bytes`: of all bodies that some client has not received yet; one that several clients
    receive counts once. `bytes_per_second`: to one party, after the first BURST_SECONDS. What is
    overdue is closed within `sweep_seconds`.
    """

    connections: int = 128
    head_bytes: int = 16 << 10
    head_seconds: float = 10.0
    answer_seconds: float = 60.0
    unsent_seconds: float = 30.0
    idle_seconds: float = 75.0  # above common scrape intervals, so that scrapes share a connection
    unsent_bytes: int = 32 << 20
    bytes_per_second: int = 64 << 20
    sweep_seconds: float = 5.0

    def within_descriptors(self) -> ConnectionLimits:
        """Return the limits with fewer connections if this process may open few files."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self
        most = max(soft - _OWN_DESCRIPTORS, _MIN_CONNECTIONS)
        return replace(self, connections=min(self.connections, most))


class Connection:
    """One connection: its client, its phase, and since when (monotonic seconds).

    `body` is what it sends now, None if it sends nothing. `is_last_answer`: whether the connection
    is closed after the current answer.
    """

    def __init__(self, connections: Connections, client: Client, tls: Tls | None) -> None:
        self.client = client
        self.tls = tls
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self.body: bytes | None = None
        self.is_last_answer = False
        self._connections = connections
        self.enter("opening")

    def enter(self, phase: Phase) -> None:
        """Start a phase."""
        self.phase, self.since = phase, time.monotonic()

    def on_data(self) -> None:
        """Note received bytes: the first bytes of a request start its clock, others do not."""
        if self.phase == "idle":
            self.enter("reading")

    def on_body(self, body: bytes) -> None:
        """Note that a body, or the next part of a stream, is to be sent."""
        self.enter("sending")
        self.body = body
        self._connections.limit_memory()

    async def before_piece(self, size: int) -> None:
        """Wait until the client's party may receive this many more bytes."""
        await asyncio.sleep(self._connections.delay(self.client.party, size))

    def on_body_sent(self) -> None:
        """Note that all but the last pieces of the body were received."""
        self.enter("answering")
        self.body = None

    def on_answer(self, *, more_received: bool) -> None:
        """Note that the answer was written; the client may not have received its last pieces yet.

        `more_received` is True when bytes of a further request have arrived already.
        """
        self.enter("reading" if more_received else "idle")
        self.body = None

    def on_close(self) -> None:
        """Note that the connection is closed."""
        self._connections.remove(self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of written pieces that the client has not received."""
        return self.transport.get_write_buffer_size() if self.transport else 0

    def is_overdue(self, limits: ConnectionLimits, now: float) -> bool:
        """Return whether the client or the answer took too long."""
        seconds = {
            "opening": limits.head_seconds,
            "reading": limits.head_seconds,
            "answering": limits.answer_seconds,
            "sending": limits.unsent_seconds,
            "idle": limits.unsent_seconds if self.unsent_bytes else limits.idle_seconds,
        }[self.phase]
        if self.transport is not None and self.transport.is_closing():
            seconds = min(seconds, limits.unsent_seconds)
        return now - self.since > seconds

    def close_after_answer(self) -> None:
        """Close the connection, after the answer if one is being made or sent."""
        self.is_last_answer = True
        if self.phase == "idle" and self.transport is not None:
            self.transport.close()
        elif self.phase not in {"answering", "sending"}:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self.body = None
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()
        self.on_close()


ProtocolFactory = Callable[[Connection], asyncio.Protocol]


class Connections:
    """Accepts connections. At the limit, a new one replaces one of the client with the most.

    `tls` returns the TLS settings for a new connection, None for plain HTTP; `protocol` makes its
    protocol.
    """

    def __init__(
        self, limits: ConnectionLimits, tls: Callable[[], Tls | None], protocol: ProtocolFactory
    ) -> None:
        self._limits, self._tls, self._protocol = limits, tls, protocol
        self._open: dict[Connection, None] = {}
        self._logged: set[str] = set()
        self._sent_until: dict[str, float] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until canceled."""
        listener.setblocking(False)
        for option, size in _SOCKET_BYTES:  # the accepted sockets inherit them
            listener.setsockopt(socket.SOL_SOCKET, option, size)
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                await self._accept_safely(listener)
        finally:
            sweeping.cancel()

    async def close(self, seconds: float) -> None:
        """Close all connections, those that are being answered after their answer.

        After this many seconds, also close the rest.
        """
        for connection in list(self._open):
            connection.close_after_answer()
        # In Python 3.10, this is not the built-in TimeoutError.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_until_all_are_closed(), seconds)
        for connection in list(self._open):
            connection.abort()

    async def _wait_until_all_are_closed(self) -> None:
        while self._open:
            await asyncio.sleep(_CLOSE_POLL_SECONDS)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)

    def delay(self, party: str, size: int) -> float:
        """Return after how many seconds to send `size` bytes to a party, and count them.

        Many connections that read large answers would otherwise take all the time of the server.
        """
        now = time.monotonic()
        begun = max(self._sent_until.get(party, 0.0), now - BURST_SECONDS)
        if party not in self._sent_until:
            recent = {key: at for key, at in self._sent_until.items() if at > now - BURST_SECONDS}
            self._sent_until = recent
        self._sent_until[party] = begun + size / self._limits.bytes_per_second
        return max(begun - now, 0.0)

    def limit_memory(self) -> None:
        """Close connections while the bodies that they send exceed the limit together.

        The first body to go is one that only parties with many connections receive, and of those
        the one that was begun first: new bodies come only with new collections.
        """
        receivers: dict[int, list[Connection]] = {}
        for item in self._open:
            if item.body:
                receivers.setdefault(id(item.body), []).append(item)
        excess = sum(len(items[0].body or b"") for items in receivers.values())
        excess -= self._limits.unsent_bytes
        if excess <= 0:
            return
        load = _Load(item for items in receivers.values() for item in items)
        for items in sorted(receivers.values(), key=load.order_of_bodies):
            if excess > 0:
                excess -= len(items[0].body or b"")
                for item in items:
                    item.abort()

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
            self._make_room(len(self._open), Client("", ""))
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        client = Client.of(accepted, *address[:2])
        if not self._make_room(self._limits.connections, client):
            accepted.close()
            return
        self._open_connection(accepted, client)

    def _open_connection(self, accepted: socket.socket, client: Client) -> None:
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

    def _make_room(self, limit: int, client: Client) -> bool:
        """Return whether `client` may have one more connection within `limit`, closing one for it.

        A connection that is being answered is closed only if its client would still have at least
        as many connections as the new one's.
        """
        if len(self._open) < limit:
            return True
        load = _Load(self._open)
        replaceable = [
            item
            for item in self._open
            if (lead := load.lead(item.client, client)) > 1
            or (item.phase != "answering" and (lead > 0 or item.client == client))
        ]
        if not replaceable:
            return False
        min(replaceable, key=load.order_of_closing).abort()
        return True

    async def _sweep(self) -> None:
        """Close the connections that are overdue, again and again until canceled."""
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


class _Load:
    """How many connections each party has, and each of its addresses."""

    def __init__(self, connections: Iterable[Connection]) -> None:
        clients = [item.client for item in connections]
        self._parties, self._addresses = Counter(item.party for item in clients), Counter(clients)

    def lead(self, client: Client, other: Client) -> int:
        """Return how many connections more `client` has than `other`, party against party."""
        if client.party == other.party:
            return self._addresses[client] - self._addresses[other]
        return self._parties[client.party] - self._parties[other.party]

    def order_of_closing(self, item: Connection) -> tuple[int, int, bool, float]:
        """Return the sorting key of the connections, those to be closed first."""
        return (*self._weight(item), item.phase == "answering", item.since)

    def order_of_bodies(self, items: Sequence[Connection]) -> tuple[int, int, float]:
        """Return the sorting key of bodies by their receivers, those to be given up first."""
        return (*max(map(self._weight, items)), min(item.since for item in items))

    def _weight(self, item: Connection) -> tuple[int, int]:
        return -self._parties[item.client.party], -self._addresses[item.client]


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
