"""HTTP over a bare socket, for what a well-behaved client never sends."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit


def connect(url: str, seconds: float = 30.0) -> socket.socket:
    """A TCP connection to the server at `url`."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=seconds)


def everything(client: socket.socket) -> bytes:
    """All bytes until the server ends the connection, one way or the other."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(1 << 16):
            received += chunk
    return bytes(received)


def ask(url: str, request: bytes) -> bytes:
    """What the server answers to these bytes until it ends the connection."""
    with connect(url) as client:
        with contextlib.suppress(OSError):
            client.sendall(request)
        return everything(client)


def status(answer: bytes) -> int:
    """The status code of an answer; 0 when there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
