"""Pages of text for Prometheus to scrape: simulated scenarios played fast, and anything else that a function writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from support.simulated_time import Series

_TARGET = re.compile(r'job="[^"]*",instance="[^"]*",?')


def pages(scrapes: Series) -> list[str]:
    """The exposition of each scrape, without the labels that Prometheus adds itself."""
    count = 1 + max(max(values) for values in scrapes.values())
    lines: list[list[str]] = [[] for _ in range(count)]
    for name, values in scrapes.items():
        if name.startswith("up{"):
            continue
        plain = _TARGET.sub("", name)
        for number, value in values.items():
            lines[number].append(f"{plain} {value:.17g}\n")
    return ["".join(page) for page in lines]


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[str]:
    """A server on loopback that answers every request with what `text` writes at that moment; yields its host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
