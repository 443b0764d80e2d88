"""The names by which a browser may open the exporter's pages: the defense against DNS rebinding.

A page of another site can make its own name resolve to 127.0.0.1, so that the user's browser treats
the exporter as part of that site. The Host header then has that name. An address cannot be faked in
this way, and no site owns `localhost`. Only browsers can be misled: scrapers and proxies may use
any name.
"""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import Scope

_BROWSER_HEADERS = ("accept-language", "sec-fetch-site", "sec-fetch-mode", "origin", "referer")
"""Headers of browsers. Pages can change the first one, but not leave it out (Fetch standard,
"HTTP-network-or-cache fetch")."""

REFUSAL = (
    "The exporter does not know the host name of this address. Open it by an IP address or as "
    "localhost, or add the name to allowed_hosts in the exporter's configuration file."
)


def is_own_name(host: str, allowed: Collection[str] = ()) -> bool:
    """Return whether a Host header has an address, a name of this machine, or one of `allowed`."""
    host = host.lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        node = platform.node().lower()
        names = {"localhost", node, node.partition(".")[0]} - {""}
        return name in names or name.endswith(".localhost") or name in map(str.lower, allowed)
    return True


def is_rebound(scope: Scope, allowed: Collection[str]) -> bool:
    """Return whether another site's name may have led a browser to this machine itself.

    A server on a network is not protected by that: there, anyone who can reach it may read it
    unless it requires a password.
    """
    headers = Headers(raw=scope.get("headers", []))
    if not _is_loopback(scope) or is_own_name(headers.get("host", "localhost"), allowed):
        return False
    return any(name in headers for name in _BROWSER_HEADERS) or headers.get(
        "user-agent", ""
    ).startswith("Mozilla/")


def _is_loopback(scope: Scope) -> bool:
    server = scope.get("server")
    try:
        ip = ipaddress.ip_address(server[0] if server else "")
    except ValueError:
        return False
    return ip.is_loopback or bool(ip.version == 6 and ip.ipv4_mapped and ip.ipv4_mapped.is_loopback)
