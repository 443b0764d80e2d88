"""The web configuration as it is now: read again when a file changes, without a restart."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from torchmem.core.errors import UsageError
from torchmem.exporter.web.config import WebConfig, load

_log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
_Version = tuple[tuple[int, int, int] | None, ...]


class LiveConfig:
    """`current()` for every connection and request; raises UsageError only when it is made.

    A file that is broken later is logged once, and what was read last goes on serving.
    """

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._config = load(file) if file else WebConfig()
        self._version = self._read_version()
        self._complaint = ""
        self._retry_at = 0.0

    def current(self) -> WebConfig:
        """What holds now."""
        if self._file is not None and self._is_due():
            self._reload(self._file)
        return self._config

    def _is_due(self) -> bool:
        version = self._read_version()
        changed, self._version = version != self._version, version
        return changed or (self._complaint != "" and self._clock() >= self._retry_at)

    def _reload(self, file: Path) -> None:
        try:
            config = self._load(file)
        except UsageError as error:
            if str(error) != self._complaint:
                _log.error("the web configuration stays as it was: %s", error)
            self._complaint, self._retry_at = str(error), self._clock() + RETRY_SECONDS
        else:
            self._config, self._complaint = config, ""
            self._version = self._read_version()
            _log.info("the web configuration %s was read again", file)

    def _load(self, file: Path) -> WebConfig:
        config = load(file)
        if (config.tls is None) != (self._config.tls is None):
            raise UsageError(f"TLS was switched on or off in {file}: restart the exporter to do so.")
        return config

    def _read_version(self) -> _Version:
        """What tells one version of each file from the next; None for one that is not there."""
        files = (*([self._file] if self._file else ()), *(self._config.tls.files if self._config.tls else ()))
        return tuple(_version(file) for file in files)


def _version(file: Path) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None
