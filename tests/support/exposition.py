"""Parse the output of an exporter like Prometheus does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Collects(Protocol):
    """A collector of metric families."""

    def collect(self) -> Sequence[Metric]:
        """Return all families."""


class Exposition:
    """Series by name and labels, which must be unique."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.series: dict[str, dict[Labels, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            labels = frozenset((name, value) for name, value in sample.labels.items() if value)
            assert labels not in self.series.setdefault(sample.name, {}), (
                f"{sample.name}{labels} is exported twice"
            )
            self.series[sample.name][labels] = sample.value

    @classmethod
    def of_text(cls, text: str) -> Exposition:
        """Parse the Prometheus text format."""
        return cls(text_string_to_metric_families(text))

    @classmethod
    def of_openmetrics(cls, text: str) -> Exposition:
        """Parse OpenMetrics, strictly."""
        return cls(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]

    def matching(self, name: str, **labels: str) -> dict[Labels, float]:
        """Return the series of a metric that have these labels."""
        required = set(labels.items())
        series = self.series.get(name, {})
        return {names: value for names, value in series.items() if required <= names}

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the only series with these labels; None if there is none."""
        values = list(self.matching(name, **labels).values())
        assert len(values) < 2, f"{name} {labels} matches {len(values)} series"
        return values[0] if values else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels."""
        series = self.matching(name, **labels)
        return {dict(names).get(label, ""): value for names, value in series.items()}


def scrape(collector: Collects) -> Exposition:
    """Collect the families, encode them as text and parse it."""
    return Exposition.of_text(generate_latest(collector).decode())
