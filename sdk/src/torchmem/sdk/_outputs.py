"""The optional outputs of one process: a node_exporter textfile and an HTTP endpoint.

Imported only when a setting asks for one of them, because prometheus_client is slow to import.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from torchmem.sample.families import View, families
from torchmem.sample.run_directory import replace_file
from torchmem.sample.sample import Sample, live_state
from torchmem.sdk._cost import TEXTFILE_SECONDS
from torchmem.sdk._errors import log
from torchmem.sdk._settings import Settings


class _ProcessCollector(Collector):
    def __init__(self, read: Callable[[], Sample]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        sample = self._read()
        state = sample.ended or live_state(sample, time.time())
        return families([View(sample, sample.process.pid, state, gpus={})])

    def describe(self) -> Iterable[Metric]:
        return []  # an empty description keeps registration from collecting


def registry(read: Callable[[], Sample]) -> CollectorRegistry:
    """Return a registry that calls `read` at every collection; the default registry is not used."""
    private = CollectorRegistry(auto_describe=False)
    private.register(_ProcessCollector(read))
    return private


class Textfile:
    """One .prom file, removed at a clean end so that node_exporter does not keep serving it.

    If `path` is a directory, each rank writes its own file into it.
    """

    def __init__(self, path: Path) -> None:
        self._given = path
        self._written = 0.0
        self.path: Path | None = None

    def write(self, sample: Sample) -> None:
        """Replace the file. Raises OSError."""
        path = self._path(sample.process.rank)
        replace_file(path, generate_latest(registry(lambda: sample)))
        self._written = sample.timestamp
        if path != self.path:
            self.remove()
            self.path = path

    def _path(self, rank: int) -> Path:
        is_file = self._given.suffix == ".prom"
        return self._given if is_file else self._given / f"torchmem-rank{rank}.prom"

    def refresh(self, sample: Sample) -> None:
        """Replace the file if it is older than TEXTFILE_SECONDS. Raises OSError."""
        if abs(sample.timestamp - self._written) >= TEXTFILE_SECONDS:
            self.write(sample)

    def remove(self) -> None:
        """Remove the file. Raises OSError."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Endpoint:
    """A running HTTP server; `url` is the address that Prometheus scrapes."""

    def __init__(self, server: WSGIServer, thread: Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{server.server_port}/metrics"

    @classmethod
    def open(cls, settings: Settings, local_rank: int, read: Callable[[], Sample]) -> Endpoint:
        """Listen on the port plus the local rank, or on any free port if that one is taken.

        Port 0 is any free port. Raises OSError if the address cannot be used at all.
        """
        port = settings.port + local_rank if settings.port else 0
        try:
            return cls.listen(port, settings.address, registry(read))
        except (OSError, OverflowError) as error:
            if port == 0:
                raise
            endpoint = cls.listen(0, settings.address, registry(read))
            log(
                logging.WARNING,
                "torchmem: cannot listen on port %d (%s), serving %s instead",
                port,
                error,
                endpoint.url,
            )
            return endpoint

    @classmethod
    def listen(cls, port: int, address: str, served: CollectorRegistry) -> Endpoint:
        """Serve `served` on exactly this port; 0 is any free one. Raises OSError."""
        return cls(*start_http_server(port, address, served), address)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1)

    def close_in_child(self) -> None:
        """Close the socket that a forked child inherited.

        Otherwise scrapes would hang on it once the parent is gone.
        """
        with contextlib.suppress(OSError):
            socket.socket.close(self._server.socket)
