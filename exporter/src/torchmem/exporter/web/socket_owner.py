"""Which user of this machine owns the other end of a connection, as the kernel shows it.

The kernel looks up one socket in constant time (sock_diag(7)). Where that is not allowed, its
table of all sockets shows the same (proc(5), /proc/net/tcp), which takes a millisecond for 10,000.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from torchmem.exporter.directory_status import OVERFLOW_UID
from torchmem.host.procfs import PROC

Address = tuple[str, int]

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ANY = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
_ANSWER = struct.Struct("=BBBB48xIIIII")
_TCP_ESTABLISHED = 1

_ESTABLISHED = "01"
_ADDRESS_WORDS = struct.Struct("@IIII")


def owner(local: Address, remote: Address, proc: Path = PROC) -> int | None:
    """Return the user ID of the socket at `local` that is connected to `remote`.

    None if it is on another machine or in another network namespace, if its process has closed it,
    or if a user namespace hides who owns it.
    """
    try:
        user = diagnosed_owner(local, remote)
    except (OSError, ValueError):
        user = None
    if user is None:
        user = next(listed_owners(local, remote, proc), None)
    return None if user == OVERFLOW_UID else user


def diagnosed_owner(local: Address, remote: Address) -> int | None:
    """Return what `owner` does, None too where the kernel has no module for this look-up.

    Raises OSError if the process may not ask, ValueError for anything but an address.
    """
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as kernel:
        kernel.sendto(_question(local, remote), (0, 0))
        answer = kernel.recv(1 << 13)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    _, state, _, _, _, _, _, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return int(user) if state == _TCP_ESTABLISHED and inode and user != OVERFLOW_UID else None


def _question(local: Address, remote: Address) -> bytes:
    source, target = _ip(local[0]), _ip(remote[0])
    interface = local[0].partition("%")[2]
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    body = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY)
        + _PORTS.pack(local[1], remote[1])
        + source.packed.ljust(16, b"\0")
        + target.packed.ljust(16, b"\0")
        + _INTERFACE_AND_COOKIE.pack(
            socket.if_nametoindex(interface) if interface else 0, _ANY, _ANY
        )
    )
    size = _HEADER.size + len(body)
    return _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + body


def listed_owners(local: Address, remote: Address, proc: Path) -> Iterator[int]:
    """Yield the owner of the socket from the kernel's tables, if it is there."""
    for table, mapped in (("tcp", False), ("tcp6", True)):
        try:
            ends = _listed(*local, mapped=mapped), _listed(*remote, mapped=mapped)
            text = (proc / "net" / table).read_text()
        except (OSError, ValueError):
            continue
        yield from _owners(text, *ends)


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


def _listed(host: str, port: int, *, mapped: bool) -> str:
    """Return an address as the kernel's table has it; `mapped`: that of IPv6.

    Each word of 32 bits is in the machine's byte order. Raises ValueError for anything but
    an address of this table.
    """
    ip = _ip(host)
    if not mapped:
        return f"{struct.unpack('@I', socket.inet_pton(socket.AF_INET, str(ip)))[0]:08X}:{port:04X}"
    text = str(ip) if ip.version == 6 else f"::ffff:{ip}"
    words = _ADDRESS_WORDS.unpack(socket.inet_pton(socket.AF_INET6, text))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without its interface, an IPv4 address as such. Raises ValueError."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return (ip.version == 6 and ip.ipv4_mapped) or ip
