"""`/sd`: the endpoints of training processes, in the format of Prometheus' http_sd_configs."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from torchmem.exporter.scrapes import Collector, SharedCall
from torchmem.exporter.web.clients import requester
from torchmem.exporter.web.fair_queue import BusyError, FairQueue
from torchmem.node.published import Published
from torchmem.sample.sample import LIVE_STATES, Process

MAX_WAITING_PER_CLIENT = 8
_MAX_SHARE = 0.25
HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::\d{1,5})?")


class ServiceDiscovery:
    """Answers with the endpoints of training processes.

    The answer is the whole list or an error. On an error, Prometheus keeps its current list.
    """

    def __init__(self, collector: Collector) -> None:
        self._published = SharedCall(
            "torchmem-sd", lambda: (collector.published(), own_addresses())
        )
        self._queue = FairQueue("torchmem-sd-answer", MAX_WAITING_PER_CLIENT, _MAX_SHARE)

    async def answer(self, request: Request) -> Response:
        """Answer /sd."""
        try:
            processes, addresses = await self._published.result()
            answer = partial(_answer, request, processes, addresses)
            return await self._queue.run(requester(request.scope), answer)
        except OSError as error:
            return PlainTextResponse(f"Cannot read the run directory: {error.strerror}.\n", 500)
        except BusyError:
            return PlainTextResponse("Too many requests are waiting: try again later.\n", 503)


def _answer(request: Request, processes: Sequence[Published], addresses: set[str]) -> Response:
    host, client = request.headers.get("host", ""), request.client.host if request.client else ""
    return JSONResponse(target_groups(processes, host, client, addresses))


def target_groups(
    published: Iterable[Published], host: str, client: str, addresses: Collection[str]
) -> list[dict[str, Any]]:
    """Return one group with one target for each live process whose endpoint the client can reach.

    `host` is the client's Host header, by which it reaches this node; `client` is the client's
    address; `addresses` are this node's own. A sample is not trusted: only a port of this node is
    taken from it, never another host or path.
    """
    groups = [
        {"targets": [target], "labels": _labels(item.sample.process, item.pid)}
        for item in published
        if item.state in LIVE_STATES
        and (target := _target(item.sample.metrics_url, host, client, addresses)) is not None
    ]
    return sorted(groups, key=lambda group: str(group["targets"]))


def own_addresses() -> set[str]:
    """Return all IP addresses of this node's interfaces."""
    import psutil  # only for /sd: it takes a megabyte

    families = {socket.AF_INET, socket.AF_INET6}
    return {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in families
    }


def _labels(process: Process, pid: int) -> dict[str, str]:
    values = {
        "rank": process.rank,
        "local_rank": process.local_rank,
        "run": process.run,
        "launch": process.launch,
        "pid": pid,
    }
    return {
        f"__meta_torchmem_{name}": str(value) for name, value in values.items() if value is not None
    }


def _target(url: str | None, host: str, client: str, addresses: Collection[str]) -> str | None:
    try:
        parts = urlsplit(url or "")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or not port:
        return None
    reachable = _reachable(name, host, client, addresses)
    return None if reachable is None else f"{reachable}:{port}"


def _reachable(name: str, host: str, client: str, addresses: Collection[str]) -> str | None:
    """Return the name by which the client reaches `name`, None if it cannot or it is another node.

    The parameters are those of `target_groups`.
    """
    address = _address("127.0.0.1" if name == "localhost" else name)
    if address is None:
        return name if name.lower() == socket.gethostname().lower() else None
    if address.is_unspecified:
        match = HOST.fullmatch(host)
        return match[1] if match else None
    if address.is_loopback:
        if not _is_on_this_node(client, addresses):
            return None
    elif str(address) not in addresses:
        return None
    return f"[{address}]" if address.version == 6 else str(address)


def _is_on_this_node(client: str, addresses: Collection[str]) -> bool:
    address = _address(client)
    return address is not None and (address.is_loopback or client in addresses)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
