"""HTTP over a plain socket, for requests that HTTP clients do not send."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit


def connect(url: str, seconds: float = 30.0) -> socket.socket:
    """Open a TCP connection to the server at `url`."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=seconds)


def everything(client: socket.socket) -> bytes:
    """Return all bytes until the server closes or resets the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(1 << 16):
            received += chunk
    return bytes(received)


def ask(url: str, request: bytes) -> bytes:
    """Send these bytes and return everything that the server answers."""
    with connect(url) as client:
        with contextlib.suppress(OSError):
            client.sendall(request)
        return everything(client)


def status(answer: bytes) -> int:
    """Return the status code of an answer, 0 without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
