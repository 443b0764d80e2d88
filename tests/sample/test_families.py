"""Families of samples: complete, declared, valid for any sample, and absent when unknown."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from support.exposition import scrape
from support.samples import UUID, full_sample, samples

from torchmem.metrics import catalog
from torchmem.metrics.catalog import CATALOG
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.sample import STATES, Sample, Steps

EXPORTERS = {
    "torchmem_gpu_hour_price",
    "torchmem_misplaced_bytes",
    "torchmem_outside_allocator_bytes",
    "torchmem_outside_allocator_start_bytes",
    "torchmem_reserved_unbacked_bytes",
    "torchmem_outside_allocator_timestamp_seconds",
    "torchmem_process_kill_cause",
    "torchmem_engine_wake_margin_bytes",
}
JUDGED = {catalog.THREAT.name, catalog.THREAT_INFO.name}
"""Series that need thresholds: tests/exporter/test_threats.py."""
OWN = {
    name
    for name in CATALOG
    if name.startswith("torchmem_") and "exporter" not in name and name not in EXPORTERS | JUDGED
}


class Collector:
    """A collector of the families of the given processes."""

    def __init__(self, *views: ProcessView) -> None:
        self._views = views

    def collect(self) -> list[Metric]:
        """Return the families."""
        return list(families(self._views))


def base_name(sample_name: str) -> str:
    """Return the catalog's name of a sample, without the suffix of a histogram."""
    for suffix in ("_bucket", "_count", "_sum", "_gcount", "_gsum"):
        if sample_name.removesuffix(suffix) in CATALOG:
            return sample_name.removesuffix(suffix)
    return sample_name


def test_a_full_sample_exports_every_metric_of_the_catalog() -> None:
    """Every metric of the catalog is exported, and no other."""
    full = full_sample()
    paged = replace(full, devices=(replace(full.devices[0], managed_bytes=3 << 20),))
    series = scrape(Collector(ProcessView(paged, 4242, "running", {UUID: "3"}))).series
    served = {base_name(name) for name in series}

    assert served == OWN


def test_errors_are_one_total_and_a_series_for_each_stage_that_has_one() -> None:
    """The total begins at 0, so that an increase shows the first error too."""
    sample = full_sample()

    def errors(**stages: int) -> dict[str, float | None]:
        cost = replace(sample.cost, errors=stages)
        view = ProcessView(replace(sample, cost=cost), 4242, "running", {UUID: "3"})
        every = scrape(Collector(view))
        found = every.by("stage", "torchmem_sdk_stage_errors_total")
        return {"total": every.value("torchmem_sdk_errors_total"), **found}

    assert errors() == {"total": 0}
    assert errors(publish=2, otlp=1) == {"total": 3, "publish": 2, "otlp": 1}


def test_labels_are_those_of_the_catalog() -> None:
    """Each sample has the declared labels; only `le` and the facts of info metrics are added."""
    for metric in families([ProcessView(full_sample(), 4242, "running", {UUID: "3"})]):
        for sample in metric.samples:
            spec = CATALOG[base_name(sample.name)]
            facts = set() if spec.kind == "info" else set(sample.labels) - {"le"} - set(spec.labels)
            assert (facts, set(spec.labels) <= set(sample.labels)) == (set(), True)


@given(st.lists(samples, max_size=2, unique_by=lambda s: (s.process.rank, s.process.pid)))
def test_any_sample_has_a_valid_exposition(given_samples: list[Sample]) -> None:
    """For any text and numbers in a sample, Prometheus can parse the result, without duplicates."""
    views = [ProcessView(sample, sample.process.pid, "running", {}) for sample in given_samples]

    assert bool(views) == bool(scrape(Collector(*views)).series)


@given(samples)
def test_unknown_is_absent(sample: Sample) -> None:
    """No value is NaN, infinite or negative; an unknown value has no series."""
    for metric in families([ProcessView(sample, 1, "running", {})]):
        assert all(0 <= row.value < float("inf") for row in metric.samples)


def test_steps_are_absent_until_one_was_counted() -> None:
    """Programs whose steps the SDK cannot see have no count, and not one of 0."""
    view = ProcessView(replace(full_sample(), steps=Steps()), 4242, "running", {})
    counted = ("torchmem_steps_total", "torchmem_step_duration_seconds")

    assert not [name for name in scrape(Collector(view)).series if name.startswith(counted)]


def test_bytes_by_pool_sum_to_the_total() -> None:
    """The sum over `pool` is the allocator's total."""
    sample = full_sample()
    rows = next(
        m
        for m in families([ProcessView(sample, 1, "running", {})])
        if m.name == "torchmem_reserved_bytes"
    ).samples

    allocator = sample.devices[0].allocator
    assert allocator is not None
    assert allocator.reserved_bytes.total == sum(row.value for row in rows)


def test_exactly_one_state_is_active() -> None:
    """The state set has all states, and 1 only for the current one."""
    for state in STATES:
        metrics = families([ProcessView(full_sample(), 1, state, {})])
        rows = next(m for m in metrics if m.name == "torchmem_process_state").samples
        assert {name: float(name == state) for name in STATES} == {
            row.labels["state"]: row.value for row in rows
        }


def test_an_unknown_value_by_pool_has_no_series() -> None:
    """`inactive_split_bytes`, which PyTorch lacks with expandable segments, is absent, not zero."""
    sample = full_sample()
    allocator = sample.devices[0].allocator
    assert allocator is not None
    device = replace(sample.devices[0], allocator=replace(allocator, inactive_split_bytes=None))

    series = scrape(
        Collector(ProcessView(replace(sample, devices=(device,)), 1, "running", {}))
    ).series

    assert "torchmem_inactive_split_bytes" not in series
