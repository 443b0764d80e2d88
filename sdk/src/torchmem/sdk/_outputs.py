"""The opt-in outputs of one process: a textfile for node_exporter, and an HTTP endpoint of its own."""

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
from torchmem.sdk._settings import Settings


class _OwnSeries(Collector):
    def __init__(self, read: Callable[[], Sample]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        sample = self._read()
        state = sample.ended or live_state(sample, time.time())
        return families([View(sample, sample.process.pid, state, gpus={})])

    def describe(self) -> Iterable[Metric]:
        return []  # an empty description keeps registration from collecting


def registry(read: Callable[[], Sample]) -> CollectorRegistry:
    """A registry whose every collection calls `read`; the user's default registry is not touched."""
    private = CollectorRegistry(auto_describe=False)
    private.register(_OwnSeries(read))
    return private


# Rendering the series costs milliseconds, and node_exporter itself is rarely scraped more often.
REFRESH_SECONDS = 10.0


class Textfile:
    """One .prom file; a directory gets one file for each rank. Removed at a clean end, so nothing lives on in it."""

    def __init__(self, path: Path, rank: int) -> None:
        self._written = 0.0
        self.path = path if path.suffix == ".prom" else path / f"torchmem-rank{rank}.prom"

    def write(self, sample: Sample) -> None:
        """Replace the file; raises OSError when the directory cannot be written."""
        replace_file(self.path, generate_latest(registry(lambda: sample)))
        self._written = sample.timestamp

    def refresh(self, sample: Sample) -> None:
        """Replace the file when it has grown old; raises OSError when the directory cannot be written."""
        if abs(sample.timestamp - self._written) >= REFRESH_SECONDS:
            self.write(sample)

    def remove(self) -> None:
        """Remove the file; raises OSError."""
        self.path.unlink(missing_ok=True)


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
            return cls(
                *start_http_server(wanted, settings.address, registry(read)), settings.address
            )
        except (OSError, OverflowError) as error:
            if wanted == 0:
                raise
            endpoint = cls(
                *start_http_server(0, settings.address, registry(read)), settings.address
            )
            log.warning(
                "torchmem: port %d cannot be used (%s), serving %s instead",
                wanted,
                error,
                endpoint.url,
            )
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
