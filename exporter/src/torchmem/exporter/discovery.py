"""`/sd`: the endpoints of training processes that serve one themselves, in the form of Prometheus' http_sd_configs."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import urlsplit

import psutil

from torchmem.exporter.rundir import Published
from torchmem.sample.sample import LIVE_STATES, Process

HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::\d{1,5})?")


def target_groups(
    published: Iterable[Published], asked_host: str, asked_from: str, addresses: Collection[str]
) -> list[dict[str, Any]]:
    """One group of one target for each living process with an endpoint on this node that the asker can reach.

    `asked_host`: the Host header, by which the asker knows this node; `asked_from`: the asker's address; `addresses`:
    this node's own. A sample is not trusted: only a port of this node is taken from it, never another host or path.
    """
    groups = [
        {"targets": [target], "labels": _labels(item.sample.process, item.pid)}
        for item in published
        if item.state in LIVE_STATES
        and (target := _target(item.sample.metrics_url, asked_host, asked_from, addresses))
        is not None
    ]
    return sorted(groups, key=lambda group: str(group["targets"]))


def own_addresses() -> set[str]:
    """All IP addresses of this node's interfaces."""
    families = {socket.AF_INET, socket.AF_INET6}
    found = [
        one
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family in families
    ]
    return {address.address.partition("%")[0] for address in found}


def _labels(process: Process, pid: int) -> dict[str, str]:
    facts = {"rank": process.rank, "local_rank": process.local_rank, "run": process.run, "pid": pid}
    return {
        f"__meta_torchmem_{name}": str(value) for name, value in facts.items() if value is not None
    }


def _target(
    url: str | None, asked_host: str, asked_from: str, addresses: Collection[str]
) -> str | None:
    try:
        parts = urlsplit(url or "")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if (
        parts.scheme != "http"
        or not port
        or (reachable := _reachable(host, asked_host, asked_from, addresses)) is None
    ):
        return None
    return f"{reachable}:{port}"


def _reachable(
    host: str, asked_host: str, asked_from: str, addresses: Collection[str]
) -> str | None:
    """`host` as the asker should call it, None when it cannot, or when it is not this node."""
    address = _address("127.0.0.1" if host == "localhost" else host)
    if address is None:
        return host if host.lower() == socket.gethostname().lower() else None
    if address.is_unspecified:
        named = HOST.fullmatch(asked_host)
        return named[1] if named else None
    asker = _address(asked_from)
    if address.is_loopback and not (asker and (asker.is_loopback or asked_from in addresses)):
        return None
    if not address.is_loopback and str(address) not in addresses:
        return None
    return f"[{address}]" if address.version == 6 else str(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
