"""The web configuration file of Prometheus exporters: TLS, passwords, headers and a rate limit.

Keys, values and defaults are those of prometheus/exporter-toolkit (docs/web-configuration.md,
v0.15), so a file written for another exporter works here. Settings that Python's ssl module does
not support are refused, never ignored. The file is read again when it changes.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmem.exporter.web.tls import Tls, load_tls
from torchmem.sample import strict_yaml
from torchmem.sample.errors import UsageError
from torchmem.sample.strict_yaml import Section

_log = logging.getLogger(__name__)

MIN_COST = 4
MAX_COST = 16  # at this cost a check takes seconds of CPU time
RETRY_SECONDS = 5.0
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
_SECTIONS = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
_FileVersion = tuple[int, int, int] | None  # modification time, size, inode; None if missing


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One request every `interval_seconds` on average, with up to `burst` requests at once."""

    interval_seconds: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    """How to serve. `tls` is None for plain HTTP; `users` are pairs of name and bcrypt hash."""

    tls: Tls | None = None
    users: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    rate_limit: RateLimit | None = None


def load(file: Path) -> WebConfig:
    """Read and check a web configuration file and the files it names; raises UsageError."""
    top = strict_yaml.read(file, _SECTIONS)
    tls = top.section("tls_server_config", Tls.KEYS)
    http = top.section("http_server_config", ("http2", "headers"))
    http.flag("http2", default=True)  # checked only: clients that support HTTP/2 accept HTTP/1.1
    return WebConfig(
        tls=load_tls(tls, file.parent) if any(key in tls for key in tls) else None,
        users=_users(top.section("basic_auth_users", None)),
        headers=_headers(http.section("headers", tuple(_HEADERS))),
        rate_limit=_rate_limit(top.section("rate_limit", ("interval", "burst"))),
    )


def _users(section: Section) -> tuple[tuple[str, str], ...]:
    for name in section:
        match = _BCRYPT.fullmatch(section.text(name))
        if match is None:
            section.refuse(
                name, "is not a bcrypt hash: make one with htpasswd -nBC 10 '' | tr -d ':\\n'."
            )
        cost = int(match[1])
        if not MIN_COST <= cost <= MAX_COST:
            section.refuse(
                name, f"has cost {cost}: make a hash with a cost from {MIN_COST} to {MAX_COST}."
            )
    return tuple((name, section.text(name)) for name in section)


def _headers(section: Section) -> tuple[tuple[str, str], ...]:
    for name, allowed in _HEADERS.items():
        value = section.choice(name, allowed, "") if allowed else section.text(name)
        if not (value.isprintable() and value.isascii()):
            section.refuse(name, "is not a valid header: give printable ASCII on one line.")
    return tuple((name, section.text(name)) for name in _HEADERS if section.text(name))


def _rate_limit(section: Section) -> RateLimit | None:
    interval = _seconds(section, "interval")
    burst = section.count("burst", 0, "requests")
    if interval and not burst:
        section.refuse("interval", "admits no request without a burst: add burst: 1 or more.")
    return RateLimit(interval, burst) if interval else None


def _seconds(section: Section, key: str) -> float:
    """Return the seconds of a duration in Go's format, such as 1m30s."""
    text = section.scalar(key, "0")
    if text == "0":
        return 0.0
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        section.refuse(key, f"is {text!r}: give a duration such as 1s or 100ms.")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


class LiveConfig:
    """The current web configuration, read again when one of its files changes.

    A file that becomes invalid is logged once, and the last valid configuration stays in use. The
    constructor raises UsageError for an invalid file. Safe to use from several threads.
    """

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._clock = file, clock
        self._config, self._versions = _read(file, load) if file else (WebConfig(), ())
        self._error = ""
        self._retry_at = 0.0
        self._lock = threading.Lock()

    def current(self) -> WebConfig:
        """Return the configuration for a new connection or request."""
        if self._file is not None:
            with self._lock:
                if self._is_due(self._file):
                    self._reload(self._file)
        return self._config

    def reload(self) -> None:
        """Read the file again, changed or not."""
        if self._file is not None:
            with self._lock:
                self._reload(self._file)

    def _is_due(self, file: Path) -> bool:
        versions = _versions(file, self._config)
        changed, self._versions = versions != self._versions, versions
        return changed or (self._error != "" and self._clock() >= self._retry_at)

    def _reload(self, file: Path) -> None:
        try:
            config, versions = _read(file, self._load)
        except UsageError as error:
            if str(error) != self._error:
                _log.error("the web configuration was not reloaded: %s", error)
            self._error, self._retry_at = str(error), self._clock() + RETRY_SECONDS
        else:
            self._config, self._versions, self._error = config, versions, ""
            _log.info("the web configuration %s was reloaded", file)

    def _load(self, file: Path) -> WebConfig:
        config = load(file)
        if (config.tls is None) != (self._config.tls is None):
            raise UsageError(f"TLS was switched on or off in {file}: restart the exporter.")
        return config


def _read(
    file: Path, load_file: Callable[[Path], WebConfig]
) -> tuple[WebConfig, tuple[_FileVersion, ...]]:
    """Return the configuration, and the versions of its files from before it was read.

    So a change during reading is noticed at the next request. The file is read twice because only
    the configuration names the other files.
    """
    versions = _versions(file, load_file(file))
    return load_file(file), versions


def _versions(file: Path, config: WebConfig) -> tuple[_FileVersion, ...]:
    return tuple(_version(path) for path in (file, *(config.tls.files if config.tls else ())))


def _version(file: Path) -> _FileVersion:
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None
