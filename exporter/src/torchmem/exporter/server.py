"""The HTTP server on a thread of its own, as the command, the demo and the tests start it.

It is our own (web/connections.py, web/http_protocol.py), because no Python server has settings for
the number, memory and time of its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette

from torchmem.exporter.application import application
from torchmem.exporter.scrapes import Collector
from torchmem.exporter.web.config import LiveConfig
from torchmem.exporter.web.connections import Connection, ConnectionLimits, Connections
from torchmem.exporter.web.http_protocol import HttpProtocol
from torchmem.sample.errors import UsageError

DEFAULT_LIMITS = ConnectionLimits()
_BACKLOG = 128
_CLOSE_SECONDS = 1
_BEATS = 3  # in the time within which one is expected


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What is called while the server responds: at its start, then well within each `seconds`."""

    beat: Callable[[], None] = lambda: None
    seconds: float | None = None


NO_HEARTBEAT = Heartbeat()


class PortInUseError(UsageError):
    """Another process listens on the port."""


class ExporterServer:
    """A running server.

    When it ends for any reason, the event `stopped` is set, and then `on_stop` is called.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: _Server,
        scheme: str,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_stop = on_stop
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._listener = listener
        self._server, self._scheme = server, scheme
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmem-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """URL of the landing page, with the port that is actually used."""
        host, port = self._address
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Stop serving. Returns within about one second, even while a scrape waits."""
        self._server.stop()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._server.run())
        finally:
            self._listener.close()
            self.stopped.set()
            self._on_stop()


class _Server:
    """Accepts connections and answers them until `stop`."""

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        web: LiveConfig,
        limits: ConnectionLimits,
        heartbeat: Heartbeat,
    ) -> None:
        self._app, self._listener, self._heartbeat = app, listener, heartbeat
        self._head_bytes = limits.head_bytes
        self._connections = Connections(limits, lambda: web.current().tls, self._protocol)
        self._lock = threading.Lock()
        self._stop: Callable[[], object] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Stop. Safe to call from any thread, also before `run`."""
        with self._lock:
            self._is_stopped = True
            if self._stop is not None:
                self._stop()

    async def run(self) -> None:
        """Serve until `stop`, then close the listener and the connections."""
        stopping = asyncio.Event()
        self._set_stop(partial(asyncio.get_running_loop().call_soon_threadsafe, stopping.set))
        try:
            async with self._app.router.lifespan_context(self._app):
                accepting = asyncio.create_task(self._connections.serve(self._listener))
                await self._beat_until(stopping)
                accepting.cancel()
                await asyncio.wait({accepting})
                self._listener.close()
                await self._connections.close(_CLOSE_SECONDS)
        finally:
            self._set_stop(None)

    def _set_stop(self, stop: Callable[[], object] | None) -> None:
        with self._lock:
            self._stop = stop
            if stop is not None and self._is_stopped:
                stop()

    async def _beat_until(self, stopping: asyncio.Event) -> None:
        seconds = self._heartbeat.seconds
        while not stopping.is_set():
            self._heartbeat.beat()
            # In Python 3.10, this is not the built-in TimeoutError.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopping.wait(), seconds and seconds / _BEATS)

    def _protocol(self, connection: Connection) -> HttpProtocol:
        return HttpProtocol(connection, self._app, self._head_bytes)


def serve(  # noqa: PLR0913 - keyword arguments of one call
    collector: Collector,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    web: LiveConfig | None = None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    heartbeat: Heartbeat = NO_HEARTBEAT,
    web_ui: bool = True,
    allowed_hosts: Collection[str] = (),
    on_stop: Callable[[], None] = lambda: None,
    give_back: Callable[[], None] = lambda: None,
) -> ExporterServer:
    """Serve `collector` on a thread, on `listener` if given, else on `host` and `port`.

    Port 0 takes a free port. `on_stop` is called when the server ends for any reason, `give_back`
    after the first collection and the first scrapes, in another thread than the server's.
    `web_ui`: whether `/` is the live page. `allowed_hosts`: see `web.host_names`.
    Raises UsageError when the address cannot be used, PortInUseError for a port in use.
    """
    web = web or LiveConfig()
    listener = listener or _listen(host, port)
    app = application(
        collector,
        web.current,
        web_ui=web_ui,
        allowed_hosts=allowed_hosts,
        give_back=give_back,
    )
    server = _Server(app, listener, web, limits, heartbeat)
    return ExporterServer(listener, server, "https" if web.current().tls else "http", on_stop)


def _ascii(host: str) -> str | bytes:
    """Return a host name so that it is not encoded by IDNA, whose tables take half a MiB."""
    return host.encode() if host.isascii() else host


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            _ascii(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise UsageError(
            f"cannot listen on {host}:{port} ({reason}): give another address."
        ) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        step = "stop the process that uses the port or give another --listen HOST:PORT."
        if isinstance(error, PermissionError):
            step = "give a port above 1023 with --listen HOST:PORT."
        problem = PortInUseError if error.errno == errno.EADDRINUSE else UsageError
        raise problem(f"cannot listen on {host}:{port} ({error.strerror}): {step}") from error
    return listener
