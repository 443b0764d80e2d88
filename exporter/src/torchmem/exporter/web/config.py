"""The web configuration file of Prometheus exporters: TLS, passwords, headers, a rate limit.

Its keys, their values and defaults are those of prometheus/exporter-toolkit (docs/web-configuration.md, v0.15), so a
file written for another exporter serves this one too. What Python's ssl cannot do is refused, never ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torchmem.exporter import strict_yaml
from torchmem.exporter.strict_yaml import Section
from torchmem.exporter.web.tls import Tls, tls

MAX_COST = 16  # one more try takes seconds of a core already
_BCRYPT = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_HEADERS = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
_TOP = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One request every `interval_seconds` on average, `burst` of them at once."""

    interval_seconds: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    """How to serve. `tls` is None for plain HTTP; `users` maps names to bcrypt hashes, empty without passwords."""

    tls: Tls | None = None
    users: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    rate_limit: RateLimit | None = None


def load(file: Path) -> WebConfig:
    """Read and check a web configuration file and all files it names; raises UsageError."""
    top = strict_yaml.read(file, _TOP)
    tls_section = top.section("tls_server_config", Tls.KEYS)
    http = top.section("http_server_config", ("http2", "headers"))
    http.flag("http2", default=True)  # HTTP/1.1 is served; a client that can do HTTP/2 takes that
    return WebConfig(
        tls=tls(tls_section, file.parent)
        if any(key in tls_section for key in tls_section)
        else None,
        users=_users(top.section("basic_auth_users", None)),
        headers=_headers(http.section("headers", tuple(_HEADERS))),
        rate_limit=_rate_limit(top.section("rate_limit", ("interval", "burst"))),
    )


def _users(section: Section) -> tuple[tuple[str, str], ...]:
    for name in section:
        cost = _BCRYPT.fullmatch(section.text(name))
        if cost is None:
            section.refuse(
                name, "is no bcrypt hash: make one with htpasswd -nBC 10 '' | tr -d ':\\n'."
            )
        if not 4 <= int(cost[1]) <= MAX_COST:
            section.refuse(
                name, f"has the cost {int(cost[1])}: make a hash with a cost from 4 to {MAX_COST}."
            )
    return tuple((name, section.text(name)) for name in section)


def _headers(section: Section) -> tuple[tuple[str, str], ...]:
    for name, allowed in _HEADERS.items():
        value = section.one_of(name, allowed, "") if allowed else section.text(name)
        if not (value.isprintable() and value.isascii()):
            section.refuse(name, "is no header's text: give printable ASCII in one line.")
    return tuple((name, section.text(name)) for name in _HEADERS if section.text(name))


def _rate_limit(section: Section) -> RateLimit | None:
    interval = _seconds(section, "interval")
    burst = section.count("burst", 0, "requests")
    if interval and not burst:
        section.refuse("interval", "lets no request through without a burst: add burst: 1 or more.")
    return RateLimit(interval, burst) if interval else None


def _seconds(section: Section, key: str) -> float:
    """A duration as Go writes it, such as 1m30s."""
    text = section.scalar(key, "0")
    if text == "0":
        return 0.0
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        section.refuse(key, f"is {text!r}: give a duration such as 1s or 100ms.")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
