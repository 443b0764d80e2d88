"""OTLP carries exactly what /metrics serves, by the data model of OpenTelemetry."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, example, given, settings
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.otlp import Received, scraped
from support.samples import full_sample, samples

from torchmem.metrics.catalog import CATALOG, MetricSpec
from torchmem.metrics.families import ProcessView, families
from torchmem.metrics.otlp import Conversion, resource, unit_of
from torchmem.sample.sample import Sample, decode, encode
from torchmem.sdk.publish.outputs import registry

NOW = 1_800_000_000.0


def sent(*data: MetricsData) -> Received:
    """What a receiver gets when these collections are sent."""
    received = Received()
    received.requests += map(encode_metrics, data)
    return received


def convert(conversion: Conversion, sample: Sample, now: float = NOW) -> Received:
    """Send one sample."""
    view = ProcessView(sample, sample.process.pid, "running", gpus={})
    return sent(conversion.convert(families([view]), now=now))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(samples)
@example(replace(full_sample(), allocator_settings={"le": "high"}))
def test_otlp_carries_what_a_scrape_does(published: Sample) -> None:
    """Every series of the text format is sent once, with the same name, labels and value."""
    sample = decode(encode(published))
    served = registry(lambda: sample)
    text = generate_latest(served).decode()
    rows = [row for family in text_string_to_metric_families(text) for row in family.samples]

    received = sent(Conversion(resource({})).convert(served.collect(), now=NOW))
    assert scraped(rows) == received.series()


def test_a_process_counts_from_its_start() -> None:
    """Sums and histograms of a process start when it did; a start in the future is not believed."""
    conversion = Conversion(resource({}), lambda: {("0", "4242", "night"): NOW - 100})
    received = convert(conversion, full_sample())

    names = ("torchmem_steps_total", "torchmem_ooms_total", "torchmem_step_duration_seconds")
    for name in names:
        assert {p.start_time_unix_nano for p in received.points(name)} == {(NOW - 100) * 1e9}
        assert {p.time_unix_nano for p in received.points(name)} == {NOW * 1e9}
    late = Conversion(resource({}), lambda: {("0", "4242", "night"): NOW + 100})
    (point,) = convert(late, full_sample()).points("torchmem_steps_total")
    assert point.start_time_unix_nano == NOW * 1e9


def test_an_unknown_start_is_the_first_observation() -> None:
    """It stays until the counter falls, and then is the time at which it was last seen."""
    conversion, starts = Conversion(resource({})), []
    for seconds, count in ((0, 5), (60, 9), (120, 2), (180, 3)):
        sample = full_sample()
        sample = replace(sample, steps=replace(sample.steps, count=count))
        (point,) = convert(conversion, sample, NOW + seconds).points("torchmem_steps_total")
        starts.append(point.start_time_unix_nano / 1e9 - NOW)

    assert starts == [0, 0, 60, 60]


def test_the_kinds_of_otlp() -> None:
    """Counters are monotonic sums, info a sum that is not, gauge histograms are gauges."""
    metrics = convert(Conversion(resource({})), full_sample()).metrics()

    cumulative = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE
    assert metrics["torchmem_ooms_total"].sum.is_monotonic
    assert cumulative == metrics["torchmem_ooms_total"].sum.aggregation_temporality
    info = metrics["torchmem_process_info"]
    assert info.WhichOneof("data") == "sum"
    assert not info.sum.is_monotonic
    histogram = metrics["torchmem_step_duration_seconds"].histogram
    assert cumulative == histogram.aggregation_temporality
    (point,) = histogram.data_points
    assert len(point.explicit_bounds) + 1 == len(point.bucket_counts)
    assert sum(point.bucket_counts) == point.count == 9
    assert not point.HasField("min")
    for suffix in ("bucket", "gcount", "gsum"):
        name = f"torchmem_free_block_size_bytes_{suffix}"
        assert metrics[name].WhichOneof("data") == "gauge"


def test_numbers_beyond_otlp_stop_nobody_else() -> None:
    """A histogram whose counts do not fit 64 bits is left out, and the rest is sent."""
    sample = full_sample()
    counts = tuple([1 << 63] * len(sample.steps.duration_counts))
    hostile = replace(sample, steps=replace(sample.steps, duration_counts=counts))
    metrics = convert(Conversion(resource({})), hostile).metrics()

    assert "torchmem_step_duration_seconds" not in metrics
    assert "torchmem_steps_total" in metrics


def test_text_that_is_no_utf_8_is_sent() -> None:
    """A run named after a file name that is not UTF-8 does not make the encoding fail."""
    received = convert(Conversion(resource({})), full_sample(run="night\udce9"))

    assert set(received.values("torchmem_steps_total", "run")) == {"night\N{REPLACEMENT CHARACTER}"}


UNIT_WORDS = {
    "By": "bytes",
    "s": "seconds",
    "J": "joules",
    "W": "watts",
    "Cel": "celsius",
    "Hz": "hertz",
    "": "",
    "1": "",
}


def translated(spec: MetricSpec) -> str:
    """Return the name that Prometheus gives to a metric from OTLP.

    Source: buildCompliantMetricName of github.com/prometheus/otlptranslator 1.0 with suffixes.
    """
    unit, _, per = unit_of(spec.name).partition("/")
    tokens = spec.name.split("_")
    for word in (UNIT_WORDS[unit], {"s": "second", "": ""}[per]):
        if word and word not in tokens:
            tokens.append(word)
    if spec.kind == "counter":
        tokens = [*(word for word in tokens if word != "total"), "total"]
    if spec.kind == "gauge" and unit == "1":
        tokens = [*(word for word in tokens if word != "ratio"), "ratio"]
    return "_".join(tokens)


def test_prometheus_keeps_the_names() -> None:
    """Prometheus adds no suffix to a name, so rules and dashboards work on what OTLP brought."""
    assert [translated(spec) for spec in CATALOG.values()] == list(CATALOG)
