"""What the driver can tell of a node reaches the dashboard "GPU node", by way of a real Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support.dashboards import QUERIES, filled_in
from support.golden_scrapes import GOLDEN
from support.stack import Prometheus, prometheus
from support.waiting import until

# Nodes that together tell everything: NVLink and GPM, MIG instances, fans, retired pages.
NODES = ("h100_busy", "mig", "rtx_4090", "v100_old_driver")
# PCIe traffic is read only on request; the newer way, by GPM, is there.
UNTOLD = {"PCIe traffic A"}


@contextmanager
def serving(text: str) -> Iterator[str]:
    """An address on loopback that answers every request with `text`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes all of the nodes."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(serving((GOLDEN / f"{name}.metrics").read_text())) for name in NODES
        ]
        watching = stack.enter_context(prometheus(tmp_path, nodes[0]))
        (tmp_path / "prometheus" / "targets" / "exporters.yml").write_text(
            json.dumps([{"targets": nodes}])
        )
        yield watching


@pytest.mark.stack
def test_gpu_node_shows_all_that_the_driver_tells(watched: Prometheus) -> None:
    """On nodes that tell everything no query of the dashboard is empty, but for what these nodes do not tell."""
    queries = {
        name.partition(": ")[2]: text for name, text in QUERIES.items() if name.startswith("node: ")
    }

    def empty() -> set[str]:
        return {
            name for name, text in queries.items() if not watched.query(filled_in(text, span="1m"))
        }

    until(lambda: empty() <= UNTOLD, pause=1)
    assert UNTOLD == empty()
