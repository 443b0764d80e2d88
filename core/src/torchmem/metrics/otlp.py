"""OpenTelemetry: metric families as OTLP metrics, and the thread that sends them.

Metrics keep their names. Prometheus' own rules for OTLP leave these names as they are, so rules and
dashboards work on what a collector writes to Prometheus. Needs the extra `torchmem[otlp]`; import
it only where a setting asks for it. All temporality is cumulative.

Sources: the OTLP data model, and "Prometheus and OpenMetrics Compatibility", both of the
OpenTelemetry specification 1.40.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from typing import Any, Literal

from opentelemetry.context import attach, set_value
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample as Row

from torchmem.metrics.repeating import Repeating
from torchmem.sample.errors import TorchmemError, UsageError
from torchmem.sample.untrusted import printable

# Units of UCUM by the word at the end of a name, without `_total`. A count has none, because "1"
# means a ratio.
UNITS = {
    "bytes": "By",
    "seconds": "s",
    "ratio": "1",
    "joules": "J",
    "watts": "W",
    "celsius": "Cel",
    "hertz": "Hz",
}
EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
}
DEFAULT_INTERVAL_SECONDS = 60.0
THREAD_NAME = "torchmem-otlp"
MAX_COUNT = 1 << 63  # the range of OTLP's integers; a user of the node can publish any number
# Optional in OTLP, though not in the annotations of HistogramDataPoint.
_UNKNOWN_EXTREMES: dict[str, Any] = {"min": None, "max": None}
_CUMULATIVE = AggregationTemporality.CUMULATIVE

Kind = Literal["gauge", "counter", "updowncounter"]
Process = tuple[str, str, str]
"""Values of the labels rank, pid and run."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric with its points, attributes and value, before it is converted to OTLP's form."""

    name: str
    kind: Kind
    unit: str
    description: str
    points: Sequence[tuple[Mapping[str, str], float]]


@dataclass(slots=True)
class _Start:
    """When a cumulative series started to count, and its last value; times in Unix nanoseconds."""

    start: int
    value: float
    time: int


@dataclass
class Conversion:
    """Converts collections of one source and remembers their series from one to the next.

    `starts` returns the start time of each process, in Unix seconds; its counters count from then.
    Any other counter counts from when it was first seen, and after it fell, from when it was last
    seen before, as the data model says for an unknown start.
    """

    resource: Resource
    starts: Callable[[], Mapping[Process, float]] = dict
    _known: dict[Hashable, _Start] = field(default_factory=dict)

    def convert(self, families: Iterable[Family], now: float | None = None) -> MetricsData:
        """Return the data of one collection at `now`, in Unix seconds, the current time if None."""
        moment = int((time.time() if now is None else now) * 1e9)
        seen, starts = self._known, self.starts()
        self._known = {}
        turn = _Turn(moment, seen, self._known, starts)
        metrics = [metric for family in families for metric in turn.of_family(family)]
        scope = InstrumentationScope("torchmem", version("torchmem"))
        return MetricsData([ResourceMetrics(self.resource, [ScopeMetrics(scope, metrics, "")], "")])


@dataclass(frozen=True, slots=True)
class _Turn:
    """One collection: its time in nanoseconds, and the starts of series, before and now."""

    now: int
    before: Mapping[Hashable, _Start]
    after: dict[Hashable, _Start]
    starts: Mapping[Process, float]

    def of_family(self, family: Family) -> Iterator[Metric]:
        if family.type == "histogram":
            points = [self._histogram_point(group) for group in _groups(family.samples)]
            data = Histogram([point for point in points if point], _CUMULATIVE)
            if data.data_points:
                yield Metric(family.name, family.documentation, unit_of(family.name), data)
        else:
            yield from map(self.of_instrument, instruments(family))

    def of_instrument(self, instrument: Instrument) -> Metric:
        points = [self._point(instrument, *point) for point in instrument.points]
        data = (
            Gauge(points)
            if instrument.kind == "gauge"
            else Sum(points, _CUMULATIVE, is_monotonic=instrument.kind == "counter")
        )
        return Metric(instrument.name, instrument.description, instrument.unit, data)

    def _point(
        self, instrument: Instrument, attributes: Mapping[str, str], value: float
    ) -> NumberDataPoint:
        start = 0
        if instrument.kind != "gauge":
            fell = value if instrument.kind == "counter" else math.inf
            start = self._start(instrument.name, attributes, fell)
        return NumberDataPoint(_known_text(attributes), start, self.now, float(value))

    def _start(self, name: str, attributes: Mapping[str, str], value: float) -> int:
        """Return when a series started to count; one that fell was reset after it was last seen."""
        rank, pid, run = (attributes.get(label, "") for label in ("rank", "pid", "run"))
        known = self.starts.get((rank, pid, run))
        key = name, frozenset(attributes.items())
        last = self.before.get(key)
        if known is not None and known * 1e9 <= self.now:
            start = int(known * 1e9)
        elif last is None:
            start = self.now
        else:
            start = last.time if value < last.value else last.start
        self.after[key] = _Start(start, value, self.now)
        return start

    def _histogram_point(self, rows: Sequence[Row]) -> HistogramDataPoint | None:
        """Return the point of one series, None if its counts do not fit OTLP."""
        by_suffix = {row.name.rpartition("_")[2]: row for row in rows if "le" not in row.labels}
        count, total = int(by_suffix["count"].value), by_suffix["sum"]
        if count >= MAX_COUNT:
            return None
        buckets = [row for row in rows if "le" in row.labels]
        cumulative = [0, *(int(row.value) for row in buckets)]
        bounds = [float(row.labels["le"]) for row in buckets]
        return HistogramDataPoint(
            attributes=_known_text(total.labels),
            start_time_unix_nano=self._start(total.name, total.labels, count),
            time_unix_nano=self.now,
            count=count,
            sum=float(total.value),
            bucket_counts=[after - before for before, after in pairwise(cumulative)],
            explicit_bounds=[bound for bound in bounds if bound != math.inf],
            **_UNKNOWN_EXTREMES,
        )


def instruments(family: Family) -> Iterator[Instrument]:
    """Yield the instruments of a family that is not a histogram: one for each name of its samples.

    Information is a sum that is not monotonic, always 1. OTLP has no gauge histogram, so each
    bucket is a gauge with the attribute `le`, as in Prometheus.
    """
    kinds: dict[str, Kind] = {"counter": "counter", "info": "updowncounter"}
    by_name: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for row in family.samples:
        by_name.setdefault(row.name, []).append((row.labels, row.value))
    for name, points in by_name.items():
        unit = "" if name.endswith(("_bucket", "_gcount")) else unit_of(family.name)
        kind = kinds.get(family.type, "gauge")
        yield Instrument(name, kind, unit, family.documentation, points)


def unit_of(name: str) -> str:
    """Return the unit of a metric by its name; empty for a count."""
    name, _, per = name.removesuffix("_total").partition("_per_")
    unit = UNITS.get(name.rpartition("_")[2], "")
    return f"{unit}/s" if per == "second" else unit


def _groups(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Return the rows of each series of a histogram."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        labels = frozenset((name, text) for name, text in row.labels.items() if name != "le")
        groups.setdefault(labels, []).append(row)
    return groups.values()


def _known_text(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that are not empty, which Prometheus treats as absent."""
    return {name: printable(text) for name, text in labels.items() if text}


def resource(attributes: Mapping[str, str | int | None]) -> Resource:
    """Return a resource with the known attributes, which OTEL_RESOURCE_ATTRIBUTES can override.

    So can OTEL_SERVICE_NAME; without it, the service is `torchmem`.
    """
    known = {name: value for name, value in attributes.items() if value is not None}
    own = {"service.name": "torchmem", "service.version": version("torchmem"), **known}
    return Resource.create(own).merge(OTELResourceDetector().detect())


def exporter(environment: Mapping[str, str]) -> MetricExporter:
    """Return OpenTelemetry's exporter, which reads OTEL_EXPORTER_OTLP_* itself.

    Raises UsageError if the protocol is unknown, not installed, or its settings cannot be used.
    """
    variables = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(environment.get, variables)), "http/protobuf")
    if protocol not in EXPORTERS:
        raise UsageError(f"{variables[1]}={protocol} is not one of {', '.join(EXPORTERS)}.")
    try:
        made: MetricExporter = import_module(EXPORTERS[protocol]).OTLPMetricExporter()
    except ModuleNotFoundError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise UsageError(f"OTLP by {protocol} needs a package: pip install {package}.") from error
    except Exception as error:
        raise UsageError(f"the OTLP exporter cannot start: {error}.") from error
    return made


def interval_seconds(environment: Mapping[str, str]) -> float:
    """Return OTEL_METRIC_EXPORT_INTERVAL, which is in milliseconds; 60 seconds by default."""
    try:
        seconds = float(environment.get("OTEL_METRIC_EXPORT_INTERVAL") or "") / 1000
    except ValueError:
        return DEFAULT_INTERVAL_SECONDS
    return seconds if 0.01 <= seconds <= threading.TIMEOUT_MAX else DEFAULT_INTERVAL_SECONDS


def is_disabled(environment: Mapping[str, str]) -> bool:
    """Return whether the environment turns OpenTelemetry or its metrics off."""
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return disabled or environment.get("OTEL_METRICS_EXPORTER", "").strip().lower() == "none"


class Push:
    """Sends what `collect` returns again and again, in a separate thread.

    `make_exporter` is called there, too. `report` is called after each attempt with the error or
    None; OpenTelemetry's own log messages are dropped.
    """

    def __init__(
        self,
        collect: Callable[[], MetricsData],
        make_exporter: Callable[[], MetricExporter],
        interval: float,
        report: Callable[[Exception | None], None],
    ) -> None:
        self._collect = collect
        self._make_exporter = make_exporter
        self._quiet = _Quiet()
        self._repeating = Repeating(
            THREAD_NAME, self._send, interval, report, begin=self._begin, end=self._end
        )
        self._repeating.start()

    def close(self, seconds: float) -> None:
        """Send once more and wait at most `seconds`, unless the last attempt failed."""
        self._repeating.close(seconds)

    def _begin(self) -> None:
        # Otherwise a script that traces its HTTP requests would trace these, too.
        attach(set_value("suppress_instrumentation", True))
        self._quiet.thread = threading.get_ident()
        self._exporter = self._make_exporter()
        for kind in type(self._exporter).__mro__:
            logging.getLogger(kind.__module__).addFilter(self._quiet)

    def _send(self) -> None:
        self._quiet.message = ""
        data = self._collect()
        if self._repeating.given_up:  # the source may be closed, and the data incomplete
            return
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise TorchmemError(f"metrics were not sent by OTLP ({self._quiet.message})")

    def _end(self) -> None:
        self._exporter.shutdown()


class _Quiet(logging.Filter):
    """Keeps the sending thread's first message, which has the reason, and logs none."""

    def __init__(self) -> None:
        super().__init__()
        self.message = ""
        self.thread: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        self.message = self.message or record.getMessage()
        return False
