"""The exporter's metrics by OTLP, with OpenTelemetry's own names for the GPUs beside ours.

Source of the names `hw.*`: OpenTelemetry's semantic conventions for hardware, 1.40 (development):
GPU, fan, temperature, and the common `hw.energy`, `hw.errors`, `hw.power` and `hw.status`.
Left out are `hw.gpu.io`, because NVML counts the bytes of NVLink but not those of PCIe, and what
the conventions do not name.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.sdk.metrics.export import MetricsData
from prometheus_client.core import Metric as Family

from torchmem.exporter.scrapes import Collector
from torchmem.host.procfs import start_time
from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.otlp import (
    Conversion,
    Instrument,
    Kind,
    Process,
    Push,
    exporter,
    interval_seconds,
    is_disabled,
    resource,
)

_log = logging.getLogger(__name__)

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Convention:
    """One metric of the conventions: what it is computed from, and the attributes of a row.

    `attributes` returns None for a row that the convention does not cover.
    """

    name: str
    kind: Kind
    unit: str
    source: MetricSpec
    attributes: Callable[[Labels], dict[str, str] | None]


def _of_gpu(_: Labels) -> dict[str, str]:
    return {"hw.type": "gpu"}


def _task(labels: Labels) -> dict[str, str] | None:
    """Leave out the share of time in which memory was accessed: it is not a task of the GPU."""
    engine = labels["engine"]
    task = "general" if engine == "gpu" else engine
    return None if engine == "memory" else {"hw.type": "gpu", "hw.gpu.task": task}


def _ecc_error(labels: Labels) -> dict[str, str] | None:
    """Errors since the driver was loaded; those of the GPU's whole life would count them twice."""
    if labels["scope"] != "volatile":
        return None
    return {"hw.type": "gpu", "error.type": labels["kind"]}


def _sensor(labels: Labels) -> dict[str, str]:
    return _part(labels, labels["sensor"]) | {"hw.sensor_location": labels["sensor"]}


_LIMITS = {
    "shutdown": ("gpu", "high.critical"),
    "slowdown": ("gpu", "throttled"),
    "gpu_max": ("gpu", "max"),
    "memory_max": ("memory", "max"),
}


def _limit(labels: Labels) -> dict[str, str] | None:
    limit = _LIMITS.get(labels["threshold"])
    if limit is None:
        return None
    sensor, kind = limit
    return _part(labels, sensor) | {"hw.sensor_location": sensor, "hw.limit_type": kind}


def _fan(labels: Labels) -> dict[str, str]:
    return _part(labels, f"fan{labels['fan']}")


def _part(labels: Labels, name: str) -> dict[str, str]:
    """Return the identity of a part of the GPU, which is a component of its own."""
    return {"hw.id": f"{labels['uuid']}/{name}", "hw.parent": labels["uuid"]}


_CONVENTIONS = (
    _Convention("hw.gpu.memory.limit", "updowncounter", "By", catalog.NVML_MEMORY_TOTAL, _of_gpu),
    _Convention("hw.gpu.memory.usage", "updowncounter", "By", catalog.NVML_MEMORY_USED, _of_gpu),
    _Convention("hw.gpu.utilization", "gauge", "1", catalog.NVML_UTILIZATION, _task),
    _Convention("hw.energy", "counter", "J", catalog.NVML_ENERGY, _of_gpu),
    _Convention("hw.power", "gauge", "W", catalog.NVML_POWER, _of_gpu),
    _Convention("hw.errors", "counter", "{error}", catalog.NVML_ECC_ERRORS, _ecc_error),
    _Convention("hw.temperature", "gauge", "Cel", catalog.NVML_TEMPERATURE, _sensor),
    _Convention("hw.temperature.limit", "gauge", "Cel", catalog.NVML_TEMPERATURE_THRESHOLD, _limit),
    _Convention("hw.fan.speed_ratio", "gauge", "1", catalog.NVML_FAN_SPEED, _fan),
)


def hardware(families: Iterable[Family]) -> Iterator[Instrument]:
    """Yield the metrics of the conventions that these families hold."""
    rows: dict[str, list[tuple[Labels, float]]] = {}
    for family in families:
        for row in family.samples:
            rows.setdefault(row.name, []).append((row.labels, row.value))
    models = {row["uuid"]: _model(row) for row, _ in rows.get(catalog.NVML_GPU_INFO.name, [])}
    for convention in _CONVENTIONS:
        points = [
            (_identity(labels, models) | own, value)
            for labels, value in rows.get(convention.source.name, [])
            if (own := convention.attributes(labels)) is not None
        ]
        if points:
            text = convention.source.help
            yield Instrument(convention.name, convention.kind, convention.unit, text, points)
    yield from _computed(rows, models)


def _computed(
    rows: Mapping[str, Sequence[tuple[Labels, float]]], models: Mapping[str, dict[str, str]]
) -> Iterator[Instrument]:
    """Yield the metrics that no single family holds."""
    used = {labels["uuid"]: n for labels, n in rows.get(catalog.NVML_MEMORY_USED.name, [])}
    shares = [
        (_identity(labels, models) | _of_gpu(labels), used[labels["uuid"]] / total)
        for labels, total in rows.get(catalog.NVML_MEMORY_TOTAL.name, [])
        if labels["uuid"] in used and total
    ]
    if shares:
        text = "Fraction of GPU memory used."
        yield Instrument("hw.gpu.memory.utilization", "gauge", "1", text, shares)
    states = [
        (_identity(labels, models) | _of_gpu(labels) | {"hw.state": state}, float(up == is_up))
        for labels, up in rows.get(catalog.NVML_GPU_UP.name, [])
        for state, is_up in (("ok", 1.0), ("failed", 0.0))
    ]
    if states:
        text = "Operational status: 1 (true) or 0 (false) for each of the possible states."
        yield Instrument("hw.status", "updowncounter", "1", text, states)


def _identity(labels: Labels, models: Mapping[str, dict[str, str]]) -> dict[str, str]:
    gpu = {"hw.id": labels["uuid"], "hw.name": f"GPU {labels['gpu']}", "hw.vendor": "NVIDIA"}
    return gpu | models.get(labels["uuid"], {})


def _model(facts: Labels) -> dict[str, str]:
    return {
        "hw.model": facts.get("name", ""),
        "hw.driver_version": facts.get("driver_version", ""),
        "hw.firmware_version": facts.get("vbios_version", ""),
    }


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
        families = self._collector.collect()
        return self._conversion.convert(families, hardware(families))


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
