"""The setting `otlp`: send this process's metrics by OTLP from a separate thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from opentelemetry.sdk.resources import Resource

from torchmem.host.procfs import start_time
from torchmem.metrics.otlp import (
    Conversion,
    Push,
    exporter,
    interval_seconds,
    is_disabled,
    resource,
)
from torchmem.sample.sample import Process, Sample
from torchmem.sdk.publish.outputs import registry


def start(read: Callable[[], Sample], report: Callable[[Exception | None], None]) -> Push | None:
    """Send what `read` returns as OpenTelemetry's environment variables say; None if it is off.

    `report` is called in another thread, after each attempt, with what failed or None.
    """
    if is_disabled(os.environ):
        return None
    conversion = Conversion(_resource(read().process), lambda: _starts(read().process))
    families = registry(read)
    return Push(
        lambda: conversion.convert(families.collect()),
        lambda: exporter(os.environ),
        interval_seconds(os.environ),
        report,
    )


def _starts(process: Process) -> dict[tuple[str, str, str], float]:
    if process.start_ticks is None:
        return {}
    labels = str(process.rank), str(process.pid), process.run
    return {labels: start_time(process.start_ticks, time.time())}


def _resource(process: Process) -> Resource:
    return resource(
        {
            "service.instance.id": f"{process.hostname}:{process.pid}",
            "host.name": process.hostname,
            "process.pid": process.pid,
            "k8s.pod.name": process.labels.get("pod"),
            "k8s.namespace.name": process.labels.get("namespace"),
        }
    )
