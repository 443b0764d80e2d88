"""What systemd passes to a service and wants to hear from it: sd_notify(3), sd_listen_fds(3)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from torchmem.sample.errors import UsageError

_FIRST_DESCRIPTOR = 3


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send one state, such as READY=1; without systemd, or when it does not listen, nothing happens."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
    ):
        sender.sendto(
            state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address
        )


def listener(environment: Mapping[str, str] = os.environ) -> socket.socket:
    """The listening socket that systemd opened for this process; raises UsageError when there is not exactly one."""
    count = environment.get("LISTEN_FDS", "0")
    if environment.get("LISTEN_PID") != str(os.getpid()) or count != "1":
        raise UsageError(
            "systemd passed no single socket: start the exporter through a .socket unit with one address."
        )
    try:
        passed = socket.socket(fileno=_FIRST_DESCRIPTOR)
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = 0
    if not listens or passed.family not in {socket.AF_INET, socket.AF_INET6}:
        raise UsageError(
            "systemd passed something that is no TCP socket: use ListenStream=HOST:PORT in its .socket unit."
        )
    os.set_inheritable(_FIRST_DESCRIPTOR, False)
    return passed
