"""The thread that sends by OTLP, and OpenTelemetry's environment variables."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from support.waiting import until

from torchmem.metrics.otlp import Push, exporter, interval_seconds, is_disabled, resource
from torchmem.sample.errors import UsageError

EMPTY = MetricsData([])


class InMemory(MetricExporter):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[MetricsData] = []
        self.is_shut_down = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object
    ) -> MetricExportResult:
        self.sent.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
        self.is_shut_down = True


class FailsThenHangs(InMemory):
    """Fails at the first attempt, and does not return from the second until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object
    ) -> MetricExportResult:
        super().export(metrics_data)
        if len(self.sent) > 1:
            self.released.wait()
        return MetricExportResult.FAILURE


def test_the_last_state_is_sent_at_the_end() -> None:
    """A push that works sends once more before it returns, and shuts the exporter down."""
    memory = InMemory()
    reports = list[Exception | None]()
    push = Push(lambda: EMPTY, lambda: memory, 3600, reports.append)
    push.close(60)

    assert (memory.sent, reports, memory.is_shut_down) == ([EMPTY], [None], True)


def test_the_first_state_may_be_sent_at_once() -> None:
    """A first attempt that begins before the constructor returns succeeds."""
    memory, reports = InMemory(), list[Exception | None]()
    push = Push(lambda: EMPTY, lambda: memory, 0, reports.append)
    until(lambda: reports)
    push.close(60)

    assert set(reports) == {None}


def test_the_end_does_not_wait_for_a_collector_that_failed() -> None:
    """After a failure, the end neither sends nor waits: the exporter hangs forever here."""
    memory, failures = FailsThenHangs(), list[Exception | None]()
    push = Push(lambda: EMPTY, lambda: memory, 0.01, failures.append)
    until(lambda: len(memory.sent) == 2)
    push.close(3600)

    assert ["not sent by OTLP" in str(failure) for failure in failures] == [True]
    assert not memory.is_shut_down
    memory.released.set()


def test_an_exception_ends_nothing() -> None:
    """A collection that raises is reported, and the next one is sent."""
    memory, failures, turns = InMemory(), list[Exception | None](), iter([True])

    def collect() -> MetricsData:
        if next(turns, False):
            raise ValueError("broken")
        return EMPTY

    push = Push(collect, lambda: memory, 0.01, failures.append)
    until(lambda: memory.sent)
    push.close(60)

    assert [str(failure) for failure in failures[:2]] == ["broken", "None"]


def test_the_environment_variables() -> None:
    """Interval, switches and protocol are OpenTelemetry's; a wrong one is a usage error."""
    assert interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": "15000"}) == 15
    assert {
        interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": text}) for text in ("", "x", "nan", "0")
    } == {60}
    assert is_disabled({"OTEL_SDK_DISABLED": "true"})
    assert is_disabled({"OTEL_METRICS_EXPORTER": "none"})
    assert not is_disabled({"OTEL_METRICS_EXPORTER": "otlp"})
    with pytest.raises(UsageError, match="http/protobuf, grpc"):
        exporter({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    if find_spec("grpc") is None or find_spec("opentelemetry.exporter.otlp.proto.grpc") is None:
        with pytest.raises(UsageError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
            exporter({"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"})


def test_the_service_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME overrides the name torchmem."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")

    assert resource({}).attributes["service.name"] == "pretraining"
