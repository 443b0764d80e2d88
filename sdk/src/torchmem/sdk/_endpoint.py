"""The opt-in endpoint of one training process: the standard prometheus_client server on a private registry."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from torchmem.core.sample import Sample
from torchmem.sdk._series import registry
from torchmem.sdk._settings import Settings

log = logging.getLogger("torchmem")


class Endpoint:
    """A running server; `url` is where Prometheus finds the series."""

    def __init__(self, server: WSGIServer, thread: Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{server.server_port}/metrics"

    @classmethod
    def open(cls, settings: Settings, local_rank: int, read: Callable[[], Sample]) -> Endpoint:
        """Listen on the port plus the local rank (port 0: any); when it is taken, on any free port.

        Raises OSError when the address cannot be used at all.
        """
        wanted = settings.port + local_rank if settings.port else 0
        try:
            return cls(*start_http_server(wanted, settings.address, registry(read)), settings.address)
        except (OSError, OverflowError) as error:
            if wanted == 0:
                raise
            endpoint = cls(*start_http_server(0, settings.address, registry(read)), settings.address)
            log.warning("torchmem: port %d cannot be used (%s), serving %s instead", wanted, error, endpoint.url)
            return endpoint

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1)

    def close_in_child(self) -> None:
        """In a forked child: drop the inherited socket, or scrapes would hang on it once the parent is gone."""
        with contextlib.suppress(OSError):
            socket.socket.close(self._server.socket)
