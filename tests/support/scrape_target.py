"""A target for Prometheus to scrape: the pages of simulated scenarios, or any other text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from support.simulated_time import Series

_TARGET = re.compile(r'job="[^"]*",instance="[^"]*",?')


def pages(scrapes: Series) -> list[str]:
    """Return the exposition of each scrape, without the labels that Prometheus adds."""
    count = 1 + max(max(values) for values in scrapes.values())
    lines: list[list[str]] = [[] for _ in range(count)]
    for series, values in scrapes.items():
        if series.startswith("up{"):
            continue
        exposed = _TARGET.sub("", series)
        for number, value in values.items():
            lines[number].append(f"{exposed} {value:.17g}\n")
    return ["".join(page) for page in lines]


@contextmanager
def serving(text: Callable[[], str]) -> Iterator[str]:
    """Serve the text that `text` returns for each request; yield the host and port on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
