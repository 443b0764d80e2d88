"""The identity of a client, so that no client takes the server's resources from the others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import NamedTuple

from starlette.types import Scope

from torchmem.exporter.web.socket_owner import owner

CLIENT = "torchmem.client"
"""Key of the scope that has the Client of the connection."""


class Client(NamedTuple):
    """A client: an address of a party, which may have many of them.

    `party` is a user of this machine, who can connect from all of its loopback addresses, and
    otherwise the same as `address`.
    """

    party: str
    address: str

    @classmethod
    def of(cls, accepted: socket.socket, address: str, port: int) -> Client:
        """Return the client at the other end of a connection."""
        name, user = client_of(address), None
        with contextlib.suppress(OSError):  # the connection has ended
            user = owner((address, port), accepted.getsockname()[:2])
        return cls(name if user is None else f"user {user}", name)


def client_of(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address, or 64 bits of an IPv6 address.

    A host usually has a whole IPv6 network of this size, so it can choose among its addresses.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.IPv6Address(int(ip) >> 64 << 64))


def requester(scope: Scope) -> str:
    """Return a name of the client that has made a request."""
    client = scope.get(CLIENT)
    if client is not None:
        return "/".join(client)
    return client_of(scope["client"][0]) if scope.get("client") else ""


def party(scope: Scope) -> str:
    """Return a name of the party that has made a request."""
    client = scope.get(CLIENT)
    return requester(scope) if client is None else str(client.party)
