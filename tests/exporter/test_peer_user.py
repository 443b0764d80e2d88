"""The user behind a request of this machine, as the kernel shows it."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from support.users import as_user, needs_root

from torchmem.exporter.web.peer_user import ADMITTED, may_look, peer_user

ADDRESSES = [
    pytest.param(socket.AF_INET, "127.0.0.1", "127.0.0.1", id="IPv4"),
    pytest.param(socket.AF_INET6, "::1", "::1", id="IPv6"),
    pytest.param(socket.AF_INET6, "::", "127.0.0.1", id="IPv4 to a socket of IPv6"),
    pytest.param(socket.AF_INET6, "::", "::ffff:127.0.0.1", id="IPv4 as IPv6"),
]


@contextlib.contextmanager
def listening(family: int, host: str) -> Iterator[socket.socket]:
    """A listening socket on a free port."""
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"this machine has no {host}: {error}")
        listener.listen()
        yield listener


def scope_of(accepted: socket.socket) -> dict[str, Any]:
    """What the application knows of a connection."""
    return {"client": accepted.getpeername()[:2], "server": accepted.getsockname()[:2]}


def user_of(listener: socket.socket, host: str) -> int | None:
    """The user of a connection to `host` that the calling process opens."""
    with (
        socket.create_connection((host, listener.getsockname()[1]), timeout=60),
        listener.accept()[0] as accepted,
    ):
        return peer_user(scope_of(accepted))


@pytest.mark.parametrize(("family", "bound", "host"), ADDRESSES)
def test_a_client_of_this_machine_is_its_user(family: int, bound: str, host: str) -> None:
    """For IPv4, IPv6, and IPv4 that arrives at a socket of IPv6."""
    with listening(family, bound) as listener:
        assert os.geteuid() == user_of(listener, host)


@needs_root
@pytest.mark.parametrize("uid", [1000, 65533])
def test_another_user_is_that_user(uid: int) -> None:
    """Not the user of the server."""
    with listening(socket.AF_INET, "127.0.0.1") as listener:
        assert uid == as_user(uid, lambda: user_of(listener, "127.0.0.1"))


def _send_and_close(address: tuple[str, int], *, reset: bool) -> None:
    with socket.create_connection(address, timeout=60) as client:
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@needs_root
@pytest.mark.parametrize("reset", [False, True])
def test_a_closed_connection_has_no_user(reset: bool) -> None:
    """The kernel shows the sockets that a process has closed as root's; here they have no user."""
    with listening(socket.AF_INET, "127.0.0.1") as listener:
        address = listener.getsockname()
        as_user(1000, lambda: _send_and_close(address, reset=reset))
        accepted, client = listener.accept()
        with accepted:
            scope = {"client": client, "server": address}
            assert peer_user(scope) is None


@pytest.mark.parametrize(
    "scope",
    [
        {},
        {"client": None, "server": None},
        {"client": ("192.0.2.1", 4711), "server": ("127.0.0.1", 9847)},
        {"client": ("2001:db8::1", 4711), "server": ("::1", 9847)},
        {"client": ("testclient", 50000), "server": ("/run/socket", None)},
    ],
)
def test_a_client_elsewhere_has_no_user(scope: dict[str, Any]) -> None:
    """Of another machine, or without addresses."""
    assert peer_user(scope) is None


@pytest.mark.parametrize(
    ("headers", "is_trusted"),
    [
        ({"host": "localhost:9847"}, True),
        ({"host": "127.0.0.1:9847"}, True),
        ({"host": "[::1]:9847"}, True),
        ({"host": "[::1]"}, True),
        ({"host": platform.node()}, True),
        ({"host": "localhost", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost", "sec-fetch-site": "none"}, True),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost", "x-forwarded-for": "192.0.2.1"}, False),
        ({"host": "localhost", "x-forwarded-proto": "https"}, False),
        ({"host": "localhost", "x-real-ip": "192.0.2.1"}, False),
        ({"host": "localhost", "forwarded": "for=192.0.2.1"}, False),
        ({"host": "localhost", "via": "1.1 proxy"}, False),
        ({"host": "localhost", "via": ""}, False),
        ({"host": "rebound.example:9847"}, False),
        ({"host": "localhost.example"}, False),
        ({"host": ""}, False),
    ],
)
def test_whom_the_kernel_cannot_show(headers: dict[str, str], is_trusted: bool) -> None:
    """Clients of a proxy, pages that link to the exporter, and sites whose name leads here."""
    with (
        listening(socket.AF_INET, "127.0.0.1") as listener,
        socket.create_connection(listener.getsockname(), timeout=60),
        listener.accept()[0] as accepted,
    ):
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {**scope_of(accepted), "headers": raw}
        assert (os.geteuid() if is_trusted else None) == peer_user(scope)
        assert may_look(scope, os.geteuid()) == is_trusted
        assert may_look({**scope, ADMITTED: True}, None)
