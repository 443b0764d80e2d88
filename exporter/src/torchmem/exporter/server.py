"""The HTTP server on a thread of its own, as the command, the demo and the tests start it.

It runs uvicorn with its own way of accepting connections (web/connections.py), because uvicorn has
no settings for their number, memory and time. That overrides methods of uvicorn which are not
documented, so pyproject.toml pins uvicorn's minor version.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import uvicorn
from starlette.applications import Starlette

from torchmem.exporter.application import application
from torchmem.exporter.scrapes import Collector
from torchmem.exporter.web.config import LiveConfig
from torchmem.exporter.web.connections import (
    Connection,
    ConnectionLimits,
    Connections,
    HttpProtocol,
)
from torchmem.sample.errors import UsageError

DEFAULT_LIMITS = ConnectionLimits()
_BACKLOG = 128
_CLOSE_SECONDS = 1
_HEARTBEAT_SECONDS = 1


class ExporterServer:
    """A running server. The event `stopped` is set when it ends for any reason."""

    def __init__(self, listener: socket.socket, server: _Server, scheme: str) -> None:
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
            self._server.run()
        finally:
            self._listener.close()
            self.stopped.set()


class _Server(uvicorn.Server):
    """uvicorn that leaves accepting to Connections. Calls `heartbeat` once a second."""

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        web: LiveConfig,
        limits: ConnectionLimits,
        heartbeat: Callable[[], None],
    ) -> None:
        self._close_streams: Callable[[], None] = app.state.close_streams
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=limits.head_bytes - 1,
                timeout_keep_alive=int(limits.idle_seconds) + 1,
                timeout_graceful_shutdown=1,
                timeout_notify=_HEARTBEAT_SECONDS,
                callback_notify=_coroutine(heartbeat),
            )
        )
        self._listener = listener
        self._head_bytes = limits.head_bytes
        self._connections = Connections(limits, lambda: web.current().tls, self._protocol)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Start accepting on the server's own listener; `sockets` is ignored."""
        # `stop` may be called from another thread as soon as the loop is set.
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._connections.serve(self._listener))

    async def main_loop(self) -> None:
        """Tick once a second; uvicorn's own loop wakes up ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _HEARTBEAT_SECONDS)

    def stop(self) -> None:
        """Leave the main loop at once. Safe to call from any thread."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            if self._loop:
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Stop accepting, then close the open connections; `sockets` is ignored."""
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listener.close()
        self._connections.close()
        self._close_streams()
        await super().shutdown(sockets=[])

    def _protocol(self, connection: Connection) -> HttpProtocol:
        state = self.lifespan.state
        return HttpProtocol(connection, self.config, self.server_state, state, self._head_bytes)


def serve(  # noqa: PLR0913 - keyword arguments of one call
    collector: Collector,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    web: LiveConfig | None = None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    heartbeat: Callable[[], None] = lambda: None,
    web_ui: bool = True,
    allowed_hosts: Collection[str] = (),
) -> ExporterServer:
    """Serve `collector` on a thread, on `listener` if given, else on `host` and `port`.

    Port 0 takes a free port. `heartbeat` is called about once a second while the server responds.
    `web_ui`: whether `/` is the live page. `allowed_hosts`: see `web.host_names`.
    Raises UsageError when the address cannot be used.
    """
    web = web or LiveConfig()
    listener = listener or _listen(host, port)
    app = application(collector, web.current, web_ui=web_ui, allowed_hosts=allowed_hosts)
    server = _Server(app, listener, web, limits, heartbeat)
    return ExporterServer(listener, server, "https" if web.current().tls else "http")


def _coroutine(function: Callable[[], None]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def call() -> None:
        function()

    return call


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise UsageError(
            f"Cannot listen on {host}:{port} ({reason}): give another address."
        ) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Cannot listen on {host}:{port} ({error.strerror}): "
            "stop the process that uses the port or give another --listen HOST:PORT."
        ) from error
    return listener
