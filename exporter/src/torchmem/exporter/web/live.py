"""The web configuration as it is now: read again when a file changes, without a restart."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from torchmem.exporter.web.config import WebConfig, load
from torchmem.sample.errors import UsageError

_log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
_Version = tuple[tuple[int, int, int] | None, ...]


class LiveConfig:
    """`current()` for every connection and request; raises UsageError only when it is made.

    A file that is broken later is logged once, and what was read last goes on serving.
    """

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._clock = file, clock
        self._config, self._version = _read(file, load) if file else (WebConfig(), ())
        self._complaint = ""
        self._retry_at = 0.0

    def current(self) -> WebConfig:
        """What holds now."""
        if self._file is not None and self._is_due(self._file):
            self._reload(self._file)
        return self._config

    def _is_due(self, file: Path) -> bool:
        version = _versions(file, self._config)
        changed, self._version = version != self._version, version
        return changed or (self._complaint != "" and self._clock() >= self._retry_at)

    def _reload(self, file: Path) -> None:
        try:
            config, version = _read(file, self._load)
        except UsageError as error:
            if str(error) != self._complaint:
                _log.error("the web configuration stays as it was: %s", error)
            self._complaint, self._retry_at = str(error), self._clock() + RETRY_SECONDS
        else:
            self._config, self._version, self._complaint = config, version, ""
            _log.info("the web configuration %s was read again", file)

    def _load(self, file: Path) -> WebConfig:
        config = load(file)
        if (config.tls is None) != (self._config.tls is None):
            raise UsageError(
                f"TLS was switched on or off in {file}: restart the exporter to do so."
            )
        return config


def _read(file: Path, load_: Callable[[Path], WebConfig]) -> tuple[WebConfig, _Version]:
    """The configuration and what its files looked like before: a change while they are read is found afterwards.

    It is read twice, for only the configuration says which files those are.
    """
    version = _versions(file, load_(file))
    return load_(file), version


def _versions(file: Path, config: WebConfig) -> _Version:
    """What tells one version of each file from the next; None for one that is not there."""
    return tuple(_version(file) for file in (file, *(config.tls.files if config.tls else ())))


def _version(file: Path) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None
