"""All connections of the server: bounded in number, memory and time, so that no client keeps another one out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torchmem.exporter.web.tls import Tls

_log = logging.getLogger(__name__)

Phase = Literal["opening", "reading", "answering", "idle"]
_FULL_SECONDS = 0.1
_MOST_REASONS = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the server.

    `head_seconds`: from the first byte of a request to the end of its head, and from a new connection's start through
    its TLS handshake to the end of its first; `answer_seconds`: for an answer; `unsent_seconds`: for the client to
    take it; `idle_seconds`: between requests; `unsent_bytes`: of all answers that clients did not take yet.
    """

    connections: int = 128
    head_bytes: int = 16 << 10
    head_seconds: float = 10.0
    answer_seconds: float = 60.0
    unsent_seconds: float = 30.0
    idle_seconds: float = (
        75.0  # longer than common scrape intervals, so that a connection serves many scrapes
    )
    unsent_bytes: int = 64 << 20
    sweep_seconds: float = 1.0


class Connection:
    """One client's connection: what it does, and since when (monotonic seconds)."""

    def __init__(self, table: Connections, tls: Tls | None) -> None:
        self.tls = tls
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self._table = table
        self.enter("opening")

    def enter(self, phase: Phase) -> None:
        """Begin something else."""
        self.phase, self.since = phase, time.monotonic()

    def heard(self) -> None:
        """Bytes came: the first ones of a request start its clock, further ones do not."""
        if self.phase == "idle":
            self.enter("reading")

    def answered(self, *, asks_on: bool) -> None:
        """The answer is handed over; the client may not have taken it yet. `asks_on`: more bytes came meanwhile."""
        self.enter("reading" if asks_on else "idle")
        self._table.bound_memory()

    @property
    def unsent_bytes(self) -> int:
        """Of the answer, what the client has not taken."""
        return self.transport.get_write_buffer_size() if self.transport else 0

    def lost(self) -> None:
        """It has ended."""
        self._table.forget(self)

    def is_overdue(self, limits: Limits, now: float) -> bool:
        """Whether the client or the answer took too long."""
        allowed = {
            "opening": limits.head_seconds,
            "reading": limits.head_seconds,
            "answering": limits.answer_seconds,
            "idle": limits.unsent_seconds if self.unsent_bytes else limits.idle_seconds,
        }
        closing = self.transport is not None and self.transport.is_closing()
        return now - self.since > (
            min(allowed[self.phase], limits.unsent_seconds) if closing else allowed[self.phase]
        )

    def end(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()
        self.lost()


async def _readable(listener: socket.socket) -> None:
    """Wait for a connection. Not `loop.sock_accept`: cancelled as one comes, it loses it and logs a traceback."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


Build = Callable[[Connection], asyncio.Protocol]


class Connections:
    """Accepts connections; where there are too many, the one that has idled longest makes room.

    `tls` gives the TLS settings that hold for a new connection, None for plain HTTP; `build` its protocol.
    """

    def __init__(self, limits: Limits, tls: Callable[[], Tls | None], build: Build) -> None:
        self._limits, self._tls, self._build = limits, tls, build
        self._open: dict[Connection, None] = {}
        self._reasons: set[str] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled."""
        listener.setblocking(False)
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                await self._accept_safely(listener)
        finally:
            sweeping.cancel()

    def close(self) -> None:
        """End those that wait for nothing but their client."""
        for connection in [one for one in self._open if one.transport is None]:
            connection.end()

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._open.pop(connection, None)

    def bound_memory(self) -> None:
        """End the slowest readers while all unsent answers together are too large."""
        waiting = {one: one.unsent_bytes for one in self._open if one.unsent_bytes}
        excess = sum(waiting.values()) - self._limits.unsent_bytes
        for connection in sorted(waiting, key=lambda one: one.since):
            if excess <= 0:
                return
            excess -= waiting[connection]
            connection.end()

    async def _accept_safely(self, listener: socket.socket) -> None:
        try:
            await self._accept(listener)
        except Exception:  # noqa: BLE001 - whatever one connection does, the next one is accepted
            _log.exception("accepting a connection failed")
            await asyncio.sleep(_FULL_SECONDS)

    async def _accept(self, listener: socket.socket) -> None:
        await _readable(listener)
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:  # the client is gone already
            return
        except OSError as error:  # no descriptor is left, or the client is gone already
            self._note(f"cannot accept a connection: {error.strerror}")
            self._make_room(len(self._open))
            await asyncio.sleep(_FULL_SECONDS)
            return
        if not self._make_room(self._limits.connections):
            accepted.close()
            return
        accepted.setblocking(False)
        with contextlib.suppress(
            OSError
        ):  # else an answer waits for the client's delayed acknowledgement, 40 ms
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, self._tls())
        self._open[connection] = None
        connection.task = asyncio.create_task(self._begin(connection, accepted))
        connection.task.add_done_callback(
            lambda task: accepted.close() if task.cancelled() else None
        )

    async def _begin(self, connection: Connection, accepted: socket.socket) -> None:
        """The TLS handshake, if any; from then on the protocol runs by itself."""
        tls = connection.tls
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._build(connection),
                accepted,
                ssl=tls.context if tls else None,
                ssl_handshake_timeout=self._limits.head_seconds if tls else None,
            )
        except (OSError, EOFError) as error:
            connection.lost()
            reason = error.reason if isinstance(error, ssl.SSLError) else type(error).__name__
            self._note(f"a TLS handshake failed: {reason}")

    def _make_room(self, most: int) -> bool:
        """Whether there is room for one more among `most`; a connection that is being answered stays."""
        if len(self._open) < most:
            return True
        oldest = min(
            (one for one in self._open if one.phase != "answering"),
            key=lambda one: one.since,
            default=None,
        )
        if oldest is not None:
            oldest.end()
        return oldest is not None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_seconds)
            now = time.monotonic()
            for connection in [one for one in self._open if one.is_overdue(self._limits, now)]:
                connection.end()

    def _note(self, reason: str) -> None:
        """Log each reason once, so that strangers cannot fill the log."""
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
            _log.warning("%s (further ones are not logged)", reason)
