"""The exporter's HTTP server on a thread of this process: started and closed by the command, the demo and tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from torchmem.exporter.scrapes import Collector
from torchmem.exporter.server import application
from torchmem.exporter.web.connections import Connection, Connections, Limits
from torchmem.exporter.web.live import LiveConfig
from torchmem.exporter.web.protocol import Protocol
from torchmem.sample.errors import UsageError

_BACKLOG = 128
_CLOSE_SECONDS = 1
DEFAULT_LIMITS = Limits()


class ExporterServer:
    """A running server. `stopped` is set when it ends for whatever reason."""

    def __init__(self, listener: socket.socket, server: _Server, scheme: str) -> None:
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._listener = listener
        self._server, self._scheme = server, scheme
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmem-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the landing page, with the port that was really taken."""
        host, port = self._address
        return (
            f"{self._scheme}://[{host}]:{port}"
            if ":" in host
            else f"{self._scheme}://{host}:{port}"
        )

    def close(self) -> None:
        """Stop serving; returns after at most about one second, whatever a scrape waits for."""
        self._server.end()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._server.run()
        finally:
            self._listener.close()
            self.stopped.set()


class _Server(uvicorn.Server):
    """uvicorn with our own way to accept connections. `beat` is called every `beat_seconds` while it lives."""

    def __init__(
        self,
        collector: Collector,
        listener: socket.socket,
        web: LiveConfig,
        limits: Limits,
        beat: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                application(collector, web.current),
                loop="asyncio",
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=limits.head_bytes,
                timeout_keep_alive=int(limits.idle_seconds) + 1,
                timeout_graceful_shutdown=1,
                timeout_notify=1,
                callback_notify=_coroutine(beat),
            )
        )
        self._listener = listener
        self._connections = Connections(limits, lambda: web.current().tls, self._protocol)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - ours is used
        """Begin to accept."""
        self._ending, self._loop = (
            asyncio.Event(),
            asyncio.get_running_loop(),
        )  # in this order: see `end`
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._connections.serve(self._listener))

    async def main_loop(self) -> None:
        """Look after time once a second; uvicorn's own loop wakes up ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1)

    def end(self) -> None:
        """Leave the loop at once; from any thread."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # it has ended already
            if self._loop:
                self._loop.call_soon_threadsafe(self._ending.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - likewise
        """Accept no more, then end what is open."""
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listener.close()
        self._connections.close()
        await super().shutdown(sockets=[])

    def _protocol(self, connection: Connection) -> Protocol:
        return Protocol(connection, self.config, self.server_state, self.lifespan.state)


def serve(  # noqa: PLR0913 - keyword arguments of one call
    collector: Collector,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    listener: socket.socket | None = None,
    web: LiveConfig | None = None,
    limits: Limits = DEFAULT_LIMITS,
    beat: Callable[[], None] = lambda: None,
) -> ExporterServer:
    """Serve `collector` from a thread, on `listener` when one is given; port 0 takes a free one.

    `beat` is called about once a second while the server answers. Raises UsageError when the address cannot be used.
    """
    web = web or LiveConfig()
    listener = listener or _listen(host, port)
    server = _Server(collector, listener, web, limits, beat)
    return ExporterServer(listener, server, "https" if web.current().tls else "http")


def _coroutine(call: Callable[[], None]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def called() -> None:
        call()

    return called


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
            f"Cannot listen on {host}:{port} ({error.strerror}): stop what uses it or give another --listen HOST:PORT."
        ) from error
    return listener
