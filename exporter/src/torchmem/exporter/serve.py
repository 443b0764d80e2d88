"""The exporter's HTTP server on a thread of this process: started and closed by the command, the demo and tests."""

from __future__ import annotations

import socket
import threading

import uvicorn

from torchmem.core.errors import UsageError
from torchmem.exporter.server import Collector, application

_BACKLOG = 128
_KEEP_ALIVE_SECONDS = 75  # longer than common scrape intervals, so that a connection serves many scrapes
_CLOSE_SECONDS = 1


class ExporterServer:
    """A running server. `stopped` is set when it ends for whatever reason."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        self._address: tuple[str, int] = self._socket.getsockname()[:2]
        self.stopped = threading.Event()
        config = uvicorn.Config(
            application(collector),
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="torchmem-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the landing page, with the port that was really taken."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Stop serving; returns after at most about one second, whatever a scrape waits for."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.stopped.set()


def serve(collector: Collector, host: str = "127.0.0.1", port: int = 0) -> ExporterServer:
    """Serve `collector` from a thread; port 0 takes a free one. Raises UsageError when the address cannot be used."""
    return ExporterServer(collector, host, port)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise UsageError(f"Cannot listen on {host}:{port} ({error.strerror}): give another address.") from error
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
