"""Which user of this machine owns the other end of a connection, as the kernel shows it.

The kernel looks up one socket in constant time (sock_diag(7)). Python has no function for that, and
the table of all sockets in /proc takes long where a client can open many.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

from torchmem.exporter.directory_status import OVERFLOW_UID

Address = tuple[str, int]

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ANY = 0xFFFFFFFF
# nlmsghdr: length, type, flags, sequence number, port. Then inet_diag_req_v2: family, protocol,
# extensions, padding, states, and an inet_diag_sockid of both ports, both addresses, interface and
# cookie.
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
# inet_diag_msg: family, state, timer, retransmits, the 48 bytes of an inet_diag_sockid, expiry,
# both queues, user ID, inode.
_ANSWER = struct.Struct("=BBBB48xIIIII")
_TCP_ESTABLISHED = 1


def owner(local: Address, remote: Address) -> int | None:
    """Return the user ID of the socket at `local` that is connected to `remote`.

    None if it is on another machine or in another network namespace, if its process has closed it,
    if a user namespace hides who owns it, or if the kernel may not be asked.
    """
    try:
        return _answered(_question(local, remote))
    except (OSError, ValueError):
        return None


def _answered(question: bytes) -> int | None:
    """Ask the kernel. Its answer is an error where it has no module for this look-up."""
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as kernel:
        kernel.sendto(question, (0, 0))
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


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without its interface, an IPv4 address as such. Raises ValueError."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return (ip.version == 6 and ip.ipv4_mapped) or ip
