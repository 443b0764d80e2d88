"""An OTLP receiver on loopback, and what it received in the form of an exposition."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client.samples import Sample
from support.local_http import Answer, Request, answering

Labels = frozenset[tuple[str, str]]


class Received:
    """The requests that a receiver got, as protobuf messages; it can refuse them."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self.requests: list[Any] = []
        self.refuses = False

    @property
    def resource(self) -> dict[str, Any]:
        """Attributes of the resource in the newest request."""
        (metrics,) = self.requests[-1].resource_metrics
        return _attributes(metrics.resource)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the newest request by name, each of which is there once."""
        (resource,) = self.requests[-1].resource_metrics
        (scope,) = resource.scope_metrics
        metrics = {metric.name: metric for metric in scope.metrics}
        assert len(metrics) == len(scope.metrics)
        return metrics

    def points(self, name: str) -> list[Any]:
        """Return the points of a metric in the newest request."""
        metric = self.metrics()[name]
        return list(getattr(metric, metric.WhichOneof("data")).data_points)

    def values(self, name: str, attribute: str) -> dict[str, float]:
        """Return the values of a metric by one of its attributes."""
        return {_attributes(point)[attribute]: point.as_double for point in self.points(name)}

    def series(self) -> dict[tuple[str, Labels], float]:
        """Return everything in the newest request as Prometheus would store it."""
        rows = [row for metric in self.metrics().values() for row in _rows(metric)]
        series = scraped(rows)
        assert len(series) == len(rows), "a series was sent twice"
        return series


def _attributes(owner: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes
    }


def _rows(metric: Any) -> Iterator[Sample]:
    kind = metric.WhichOneof("data")
    for point in getattr(metric, kind).data_points:
        attributes = _attributes(point)
        if kind != "histogram":
            yield Sample(metric.name, attributes, point.as_double)
            continue
        bounds = [*point.explicit_bounds, math.inf]
        for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
            yield Sample(f"{metric.name}_bucket", {**attributes, "le": str(bound)}, count)
        yield Sample(f"{metric.name}_count", attributes, point.count)
        yield Sample(f"{metric.name}_sum", attributes, point.sum)


def scraped(rows: Iterable[Sample]) -> dict[tuple[str, Labels], float]:
    """Return the rows of an exposition in the form of `Received.series`."""
    return {(row.name, frozenset(_normal(row))): row.value for row in rows}


def _normal(row: Sample) -> Iterator[tuple[str, str]]:
    for name, text in row.labels.items():
        if text:  # a user's own label may be called le, too
            is_bound = name == "le" and row.name.endswith("_bucket")
            yield name, str(float(text)) if is_bound else text


@contextmanager
def receiver() -> Iterator[Received]:
    """Run a receiver of OTLP over HTTP."""
    received = Received()

    def receive(request: Request) -> Answer:
        body = request.body
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        received.requests.append(ExportMetricsServiceRequest.FromString(body))
        return Answer(403 if received.refuses else 200, content_type="application/x-protobuf")

    with answering(receive) as address:
        received.url = f"http://{address}"
        yield received


def variables(url: str, interval: float = 0.2) -> dict[str, str]:
    """Return OpenTelemetry's variables for a receiver and an interval in seconds."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_METRIC_EXPORT_INTERVAL": str(int(interval * 1000)),
    }
