"""An HTTP server on loopback, whose answers the test chooses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass(frozen=True, slots=True)
class Request:
    """A GET or POST."""

    path: str
    headers: Message
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server returns."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def answering(answer: Callable[[Request], Answer]) -> Iterator[str]:
    """Return what `answer` returns for each request; yield HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            given = answer(Request(self.path, self.headers, body))
            self.send_response(given.status)
            self.send_header("Content-Type", given.content_type)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body)))
            self.end_headers()
            self.wfile.write(given.body)

        do_GET = do_POST = _answer  # noqa: N815 - the names that BaseHTTPRequestHandler calls

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def sending(pieces: Callable[[], Iterator[bytes]], pause: float = 0.0) -> Iterator[str]:
    """Send these pieces on each connection, with a pause after each; yield the URL."""

    def send(client: socket.socket) -> None:
        with client, suppress(OSError):
            for piece in pieces():
                client.sendall(piece)
                time.sleep(pause)

    def accept() -> None:
        with suppress(OSError):
            while True:
                Thread(target=send, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
