"""The exporter's metrics by OTLP."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping

from opentelemetry.sdk.metrics.export import MetricsData

from torchmem.exporter.scrapes import Collector
from torchmem.host.procfs import start_time
from torchmem.metrics.otlp import (
    Conversion,
    Process,
    Push,
    exporter,
    interval_seconds,
    is_disabled,
    resource,
)

_log = logging.getLogger(__name__)


def process_starts(collector: Collector, now: float) -> dict[Process, float]:
    """Return the start of each process in Unix seconds, by its labels rank, pid and run."""
    try:
        published = collector.published()
    except OSError:  # the collection reports it too
        return {}
    return {
        (
            str(item.sample.process.rank),
            str(item.pid_label or item.pid),
            item.sample.process.run,
        ): start_time(item.sample.process.start_ticks, now)
        for item in published
        if item.sample.process.start_ticks is not None
    }


class _Source:
    """Collects once for each call."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        node = platform.node()
        own = resource({"service.instance.id": node, "host.name": node})
        self._conversion = Conversion(own, lambda: process_starts(collector, time.time()))

    def __call__(self) -> MetricsData:
        return self._conversion.convert(self._collector.collect())


def start(collector: Collector, environment: Mapping[str, str] = os.environ) -> Push | None:
    """Start sending by OTLP, as set by OpenTelemetry's environment variables; None if it is off.

    Raises UsageError if the exporter cannot be made from them.
    """
    if is_disabled(environment):
        return None
    made = exporter(environment)
    return Push(_Source(collector), lambda: made, interval_seconds(environment), _Outages())


class _Outages:
    """Logs when sending begins to fail, and when it works again."""

    def __init__(self) -> None:
        self._failure: Exception | None = None

    def __call__(self, failure: Exception | None) -> None:
        if failure and not self._failure:
            _log.warning("%s; the exporter tries again", failure)
        if self._failure and not failure:
            _log.info("metrics are sent by OTLP again")
        self._failure = failure
