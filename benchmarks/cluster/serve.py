"""Serve all nodes of a simulated fleet on loopback: /node/NUMBER/metrics.

    python -m benchmarks.cluster.serve PORT SPEED START healthy|sick

At each interval, the exporter's own code renders two nodes, one of them with ranks that ended. All
other nodes are copies with other UUIDs, pids, ranks and runs. A run takes four nodes and an hour.
The next one starts immediately, with new pids, and for 15 minutes the exporter also serves the
ended one.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from support.h100_node import FIRST_DEAD_PID, H100Node, h100_node

GPUS = 8
NODES_OF_A_RUN = 4
RUN_SECONDS = 3600.0
SERVED_SECONDS = 900.0
INTERVAL = 15.0
_NODE, _NEW, _OLD = "NODENODE", "NEWRUN", "OLDRUN"
_CHANGING = re.compile(rf'({_NODE}|{_NEW}|{_OLD}|pid="\d+"|rank="\d+")')


class Fleet:
    """Pages of all nodes; `speed` simulated seconds pass per second since `start` (Unix time)."""

    def __init__(self, plain: H100Node, changing: H100Node, speed: float, start: float) -> None:
        self._nodes = {False: plain, True: changing}
        self._gpus = {pid: gpu for node in (plain, changing) for gpu, pid in enumerate(node.pids)}
        self._speed, self._start = speed, start
        self._pieces: dict[bool, tuple[int, list[str]]] = {}

    def page(self, number: int) -> bytes:
        """Return the current exposition of one node."""
        now = RUN_SECONDS + (time.time() - self._start) * self._speed
        # Runs end one after another, not at the same time.
        run = number // NODES_OF_A_RUN
        generation, age = divmod(now + run * 0.618 * RUN_SECONDS, RUN_SECONDS)
        pieces = list(self._rendered(age < SERVED_SECONDS, now))
        names = _names(number, run, int(generation), self._gpus)
        pieces[1::2] = [names(piece) for piece in pieces[1::2]]
        return "".join(pieces).encode()

    def _rendered(self, changing: bool, now: float) -> list[str]:
        tick = int(now / INTERVAL)
        if self._pieces.get(changing, (None,))[0] != tick:
            self._pieces[changing] = (
                tick,
                _CHANGING.split(self._nodes[changing].page(tick * INTERVAL)),
            )
        return self._pieces[changing][1]


def _names(number: int, run: int, generation: int, gpus: Mapping[int, int]) -> Callable[[str], str]:
    known = {
        _NODE: f"{number:08x}",
        _NEW: f"train-{run}-{generation}",
        _OLD: f"train-{run}-{generation - 1}",
    }

    def name(piece: str) -> str:
        if piece not in known:
            label, _, value = piece.rstrip('"').partition('="')
            known[piece] = f'{label}="{_number(label, int(value), number, generation, gpus)}"'
        return known[piece]

    return name


def _number(label: str, value: int, number: int, generation: int, gpus: Mapping[int, int]) -> int:
    if label == "rank":
        return value + number % NODES_OF_A_RUN * GPUS
    if value >= FIRST_DEAD_PID:
        return 10_000 + (generation - 1) * GPUS + value - FIRST_DEAD_PID
    return 10_000 + generation * GPUS + gpus[value]


class Handler(BaseHTTPRequestHandler):
    """Serves the pages of `fleet`; paths end in /NUMBER/metrics."""

    protocol_version = "HTTP/1.1"
    fleet: Fleet
    rendering = Lock()

    def do_GET(self) -> None:
        """Answer with a page."""
        with self.rendering:
            body = self.fleet.page(int(self.path.split("/")[-2]))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's
        """Log nothing."""


if __name__ == "__main__":
    uuids = [f"GPU-{_NODE}-0000-4000-8000-00000000000{index}" for index in range(GPUS)]
    healthy = sys.argv[4] == "healthy"
    with ExitStack() as stack:
        plain = stack.enter_context(h100_node(uuids, GPUS, _NEW, healthy=healthy))
        changing = stack.enter_context(h100_node(uuids, GPUS, _NEW, _OLD, healthy=healthy))
        Handler.fleet = Fleet(plain, changing, float(sys.argv[2]), float(sys.argv[3]))
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
