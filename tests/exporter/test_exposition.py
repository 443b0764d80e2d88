"""The exposition: the bytes that prometheus_client would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Exemplar
from support.samples import full_sample, samples

from torchmem.exporter import exposition
from torchmem.sample.families import View, families
from torchmem.sample.sample import Sample

LIBRARY_OPENMETRICS: Callable[[CollectorRegistry], bytes] = (
    generate_openmetrics  # which carries no types
)
KINDS = (
    "counter",
    "gauge",
    "info",
    "stateset",
    "histogram",
    "gaugehistogram",
    "summary",
    "unknown",
)
SUFFIXES = ("", "_total", "_created", "_info", "_bucket", "_gsum", "_gcount", "_sum", "_count")
words = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
names = words | st.sampled_from(["größe", "a.b", "a:b", "9a", "le"])
label_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.floats() | st.integers(-(1 << 70), 1 << 70)


@dataclass(frozen=True)
class Given(CollectorRegistry):
    """Families as they are."""

    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families


@st.composite
def metrics(draw: st.DrawFn) -> Metric:
    """Any family that prometheus_client's classes can hold."""
    name = draw(
        words.filter(
            lambda name: not name.endswith(("_total", "_info", "_created", "_gsum", "_gcount"))
        )
    )
    metric = Metric(name, draw(label_values), draw(st.sampled_from(KINDS)))
    for suffix in draw(st.lists(st.sampled_from(SUFFIXES), max_size=4)):
        metric.add_sample(
            draw(st.just(name + suffix) | names),
            draw(st.dictionaries(names, label_values, max_size=3)),
            draw(values),
            timestamp=draw(st.none() | st.sampled_from([0, 1.5])),
            exemplar=draw(st.sampled_from([None, None, Exemplar({"trace": "a"}, 1.0)]))
            if suffix == "_bucket"
            else None,
        )
    return metric


def check(given_families: Sequence[Metric]) -> None:
    """Both formats are what prometheus_client writes."""
    registry = Given(given_families)
    assert exposition.text(registry) == generate_latest(registry)
    try:
        expected = LIBRARY_OPENMETRICS(registry)
    except ValueError:  # an exemplar where OpenMetrics knows none
        with pytest.raises(ValueError, match="exemplars"):
            exposition.openmetrics(registry)
    else:
        assert exposition.openmetrics(registry) == expected


@settings(max_examples=30)
@given(st.lists(samples, max_size=3))
def test_what_ranks_publish_is_written_as_by_prometheus_client(published: list[Sample]) -> None:
    """For the families of all samples, every byte is the same."""
    check(
        list(
            families(
                [View(sample, number, "running", {}) for number, sample in enumerate(published)]
            )
        )
    )


@given(st.lists(metrics(), max_size=3))
def test_any_family_is_written_as_by_prometheus_client(given_families: list[Metric]) -> None:
    """So it is for kinds, names, labels, times and exemplars that torchmem does not have."""
    check(given_families)


def test_a_label_set_is_told_apart_from_its_mirror() -> None:
    """The same two values under exchanged names stay two series."""
    metric = Metric("a", "", "gauge")
    metric.add_sample("a", {"x": "1", "y": "2"}, 1)
    metric.add_sample("a", {"y": "1", "x": "2"}, 2)
    assert b'a{x="1",y="2"} 1.0\na{x="2",y="1"} 2.0\n' in exposition.text(Given([metric]))


def test_none_of_our_own_families_is_left_to_prometheus_client() -> None:
    """Names and label names of a sample with everything in it are plain."""
    found = families([View(full_sample(), 1, "running", {})])
    assert all(exposition._Lines().of(family.samples) for family in found)
