"""The page of metrics that the setting `port` serves, in every form of it.

It is rendered on request and then kept for a while, so that a thousand requests cost as much as
one.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from torchmem.sdk.safety.cost import MAX_PAGE_SECONDS, PAGE_BUDGET, PAGE_SECONDS

GZIP_LEVEL = 1  # a page shrinks twentyfold already; higher levels cost more CPU time
_OPENMETRICS = "application/openmetrics-text"


class Page:
    """The series of `registry` in both formats, each rendered at most once in PAGE_SECONDS."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._bodies: dict[tuple[bool, bool], bytes] = {}
        self._rendered_at = 0.0
        self._spent = 0.0

    def body(self, *, openmetrics: bool, compressed: bool) -> bytes:
        """Return the page. Raises what the registry's collectors raise."""
        if self._bodies and self._clock() - self._rendered_at >= self._lifetime():
            self._bodies.clear()
        if not self._bodies:
            self._rendered_at, self._spent = self._clock(), 0.0
        form = openmetrics, compressed
        if form not in self._bodies:
            started = time.thread_time()
            self._bodies[form] = self._render(*form)
            self._spent += time.thread_time() - started
        return self._bodies[form]

    def _lifetime(self) -> float:
        return min(max(PAGE_SECONDS, self._spent / PAGE_BUDGET), MAX_PAGE_SECONDS)

    def _render(self, openmetrics: bool, compressed: bool) -> bytes:
        if compressed:
            return gzip.compress(
                self.body(openmetrics=openmetrics, compressed=False), GZIP_LEVEL, mtime=0
            )
        encode, _ = choose_encoder(_OPENMETRICS if openmetrics else "")
        return encode(self._registry)


def content_type(*, openmetrics: bool) -> str:
    """Return the media type of the page."""
    return choose_encoder(_OPENMETRICS if openmetrics else "")[1]


def wants_openmetrics(accept: str) -> bool:
    """Return whether this Accept header names OpenMetrics 1.0.0, or no version of it."""
    for item in accept.split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        versions = [each[8:] for each in parameters if each.startswith("version=")]
        if name == _OPENMETRICS and (not versions or "1.0.0" in versions):
            return True
    return False
