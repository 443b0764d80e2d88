"""Which user of this machine made a request, as the kernel shows it.

The server sees a name and a password only where the administrator requires them. A connection from
this machine also has an owner: the socket of its other end is in the same tables of the kernel.
Through `ssh -L` that is the user who logged in, because sshd opens the connection as that user. A
proxy on this machine is its own user, whoever its clients are.

A page of another site must not make use of that through the user's browser. Browsers name the site
in a header, and the Host header shows a site whose name leads to this machine (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import platform
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from torchmem.exporter.directory_status import OVERFLOW_UID
from torchmem.sample.procfs import PROC

_ESTABLISHED = "01"
_ADDRESS_WORDS = struct.Struct("@IIII")

ADMITTED = "torchmem.admitted"
"""Key of the scope that is True where the client has given a password."""


def may_look(scope: Scope, owner: int | None) -> bool:
    """Return whether a request may see what is meant for one user of the node alone.

    Those who may are that user and root on this machine, and everyone whom the administrator has
    given a password. It reads a table of the kernel, which takes a millisecond for 10,000 sockets.
    """
    return scope.get(ADMITTED, False) or peer_user(scope) in ({0} if owner is None else {0, owner})


def peer_user(scope: Scope, proc: Path = PROC) -> int | None:
    """Return the user ID that opened the request's connection, from `/proc/net/tcp` and `tcp6`.

    None if the client is on another machine or in another network namespace, if it has closed the
    connection, if a user namespace hides who it is, or if a page of another site may have made the
    request.
    """
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or _is_foreign(Headers(raw=scope.get("headers", []))):
        return None
    for table, mapped in (("tcp", False), ("tcp6", True)):
        try:
            ends = _address(*client[:2], mapped=mapped), _address(*server[:2], mapped=mapped)
            text = (proc / "net" / table).read_text()
        except (OSError, ValueError):
            continue
        for user in _owners(text, *ends):
            return None if user == OVERFLOW_UID else user
    return None


def _is_foreign(headers: Headers) -> bool:
    """Return whether a page that is not the exporter's may have made the request."""
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        return True
    host = headers.get("host", "localhost").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name not in {"localhost", platform.node().lower()}
    return False


def _owners(table: str, local: str, remote: str) -> Iterator[int]:
    """Yield the owner of the socket between two addresses.

    A socket that its process has closed has no inode, and belongs to root in the table.
    """
    wanted = f": {local} {remote} {_ESTABLISHED} "
    for line in table.splitlines():
        if wanted in line:
            fields = line.split()
            if fields[9] != "0":
                yield int(fields[7])


def _address(host: str, port: int, *, mapped: bool) -> str:
    """Return an address as the kernel's table has it; `mapped`: that of IPv6.

    Each word of 32 bits is in the machine's byte order. Raises ValueError for what is no address
    of this table.
    """
    ip = ipaddress.ip_address(host.partition("%")[0])
    ip = (ip.version == 6 and ip.ipv4_mapped) or ip
    if not mapped:
        return f"{struct.unpack('@I', socket.inet_pton(socket.AF_INET, str(ip)))[0]:08X}:{port:04X}"
    text = str(ip) if ip.version == 6 else f"::ffff:{ip}"
    words = _ADDRESS_WORDS.unpack(socket.inet_pton(socket.AF_INET6, text))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
