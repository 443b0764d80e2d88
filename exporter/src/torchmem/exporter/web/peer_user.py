"""Which user of this machine made a request, as the kernel shows it.

The server sees a name and a password only where the administrator requires them. A connection from
this machine also has an owner: the socket of its other end is known to the kernel. Through `ssh -L`
that is the user who logged in, because sshd opens the connection as that user. A proxy on this
machine is its own user, whoever its clients are, so what a proxy passes on has no user. Proxies say
so in a header.

A page of another site must not make use of that through the user's browser. Browsers name the site
in a header, and the Host header shows a site whose name leads to this machine (DNS rebinding).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from torchmem.exporter.web.host_names import is_own_name
from torchmem.exporter.web.socket_owner import owner

ADMITTED = "torchmem.admitted"
"""Key of the scope that is True where the client has given a password."""

_FORWARDING_HEADERS = {"forwarded", "via", "x-real-ip"}
_FORWARDING_PREFIX = "x-forwarded-"
"""Headers that proxies add: RFC 7239, RFC 9110 section 7.6.3, and those from before them."""


def may_look(scope: Scope, file_owner: int | None) -> bool:
    """Return whether a request may see what only one user of the node may see.

    Allowed are that user and root on this machine, and everyone to whom the administrator has
    given a password.
    """
    allowed = {0} if file_owner is None else {0, file_owner}
    return scope.get(ADMITTED, False) or peer_user(scope) in allowed


def peer_user(scope: Scope) -> int | None:
    """Return the user ID that opened the request's connection.

    None if the client is on another machine or in another network namespace, if it has closed the
    connection, if a user namespace hides who it is, if a proxy has passed the request on, or if a
    page of another site may have made it.
    """
    client, server = scope.get("client"), scope.get("server")
    headers = Headers(raw=scope.get("headers", []))
    if not client or not server or _is_forwarded(headers) or is_foreign(headers):
        return None
    if server[1] is None:  # a Unix socket
        return None
    return owner((client[0], client[1]), (server[0], server[1]))


def _is_forwarded(headers: Headers) -> bool:
    return any(
        name in _FORWARDING_HEADERS or name.startswith(_FORWARDING_PREFIX) for name in headers
    )


def is_foreign(headers: Headers) -> bool:
    """Return whether a page that is not the exporter's may have made the request."""
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        return True
    return not is_own_name(headers.get("host", "localhost"))
