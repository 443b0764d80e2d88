"""Samples become families: complete, declared, absent when unknown, and valid whatever the input."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.samples import UUID, full_sample, samples

from torchmem.sample.catalog import CATALOG
from torchmem.sample.families import View, families
from torchmem.sample.sample import STATES, Sample

OWN = {
    name
    for name in CATALOG
    if name.startswith("torchmem_") and "exporter" not in name and "outside" not in name
}


class _Given:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """The families as they are."""
        return self._metrics

    def describe(self) -> list[Metric]:
        """Nothing, so that registration does not collect."""
        return []


def exposition(*views: View) -> str:
    """What Prometheus would scrape."""
    registry = CollectorRegistry()
    registry.register(_Given(list(families(views))))
    return generate_latest(registry).decode()


def base_name(sample_name: str) -> str:
    """The catalogue's name of a sample: histogram suffixes away."""
    for suffix in ("_bucket", "_count", "_sum", "_gcount", "_gsum"):
        if sample_name.removesuffix(suffix) in CATALOG:
            return sample_name.removesuffix(suffix)
    return sample_name


def test_a_full_sample_gives_every_metric_of_the_catalogue() -> None:
    """Nothing in the catalogue is a dead letter, and nothing is served that it does not declare."""
    shown = exposition(View(full_sample(), 4242, "running", {UUID: "3"}))
    served = {base_name(s.name) for f in text_string_to_metric_families(shown) for s in f.samples}

    assert OWN == served


def test_labels_are_those_of_the_catalogue() -> None:
    """Every sample carries exactly the declared labels, beside `le` and the facts of info metrics."""
    for metric in families([View(full_sample(), 4242, "running", {UUID: "3"})]):
        for sample in metric.samples:
            spec = CATALOG[base_name(sample.name)]
            facts = set() if spec.kind == "info" else set(sample.labels) - {"le"} - set(spec.labels)
            assert (set(), True) == (facts, set(spec.labels) <= set(sample.labels))


@given(st.lists(samples, max_size=2, unique_by=lambda s: (s.process.rank, s.process.pid)))
def test_any_sample_gives_a_valid_exposition(given_samples: list[Sample]) -> None:
    """Whatever text and numbers a sample holds, Prometheus can parse the result and no series stands twice."""
    shown = exposition(
        *(View(sample, sample.process.pid, "running", {}) for sample in given_samples)
    )

    series = [
        (s.name, frozenset(s.labels.items()))
        for f in text_string_to_metric_families(shown)
        for s in f.samples
    ]
    assert len(series) == len(set(series))


@given(samples)
def test_unknown_is_absent(sample: Sample) -> None:
    """No value is NaN, infinite or negative: what is not known has no sample."""
    for metric in families([View(sample, 1, "running", {})]):
        assert all(0 <= row.value < float("inf") for row in metric.samples)


def test_bytes_by_pool_sum_to_the_total() -> None:
    """Summing over `pool` gives the allocator's own total."""
    sample = full_sample()
    rows = next(
        m for m in families([View(sample, 1, "running", {})]) if m.name == "torchmem_reserved_bytes"
    ).samples

    allocator = sample.devices[0].allocator
    assert allocator is not None
    assert allocator.reserved_bytes.total == sum(row.value for row in rows)


def test_exactly_one_state_is_on() -> None:
    """The state set names all states and marks the one that holds."""
    for state in STATES:
        metrics = families([View(full_sample(), 1, state, {})])
        rows = next(m for m in metrics if m.name == "torchmem_process_state").samples
        assert {name: float(name == state) for name in STATES} == {
            row.labels["state"]: row.value for row in rows
        }


def test_expandable_segments_have_no_inactive_split() -> None:
    """A value PyTorch does not keep in this mode has no series, instead of a false zero."""
    sample = full_sample()
    allocator = sample.devices[0].allocator
    assert allocator is not None
    device = replace(sample.devices[0], allocator=replace(allocator, inactive_split_bytes=None))

    shown = exposition(View(replace(sample, devices=(device,)), 1, "running", {}))

    assert "torchmem_inactive_split_bytes{" not in shown
