"""One process's own series as a private prometheus_client registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from torchmem.core.families import View, families
from torchmem.core.sample import Sample
from torchmem.core.state import living_state


class _OwnSeries(Collector):
    def __init__(self, read: Callable[[], Sample]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        sample = self._read()
        state = sample.ended or living_state(sample, time.time())
        return families([View(sample, sample.process.pid, state, gpus={})])

    def describe(self) -> Iterable[Metric]:
        return []  # an empty description keeps registration from collecting


def registry(read: Callable[[], Sample]) -> CollectorRegistry:
    """A registry whose every collection calls `read`; the user's default registry is not touched."""
    private = CollectorRegistry(auto_describe=False)
    private.register(_OwnSeries(read))
    return private
