"""A token bucket: one request every interval on average, a burst of them at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchmem.exporter.web.config import RateLimit


class Bucket:
    """Tokens of one rate limit; a changed limit starts with a full bucket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit: RateLimit | None = None
        self._tokens = 0.0
        self._filled = 0.0

    def take(self, limit: RateLimit | None) -> bool:
        """Take a token; False when there is none."""
        if limit is None:
            return True
        now = self._clock()
        if limit != self._limit:
            self._limit, self._tokens, self._filled = limit, limit.burst, now
        self._tokens = min(
            limit.burst, self._tokens + (now - self._filled) / limit.interval_seconds
        )
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
