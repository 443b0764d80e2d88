"""Reading back what an exporter serves, as Prometheus would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Collects(Protocol):
    """Anything that gives metric families."""

    def collect(self) -> Sequence[Metric]:
        """All families."""


class Exposition:
    """Series by name and labels; two series with the same name and labels are an error."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.series: dict[str, dict[Labels, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            labels = frozenset((name, value) for name, value in sample.labels.items() if value)
            assert labels not in self.series.setdefault(sample.name, {}), (
                f"{sample.name}{labels} is served twice"
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
        """All series of that name that carry these labels."""
        wanted = set(labels.items())
        return {
            found: value for found, value in self.series.get(name, {}).items() if wanted <= found
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The one series of that name that carries these labels; None when it is absent."""
        found = list(self.matching(name, **labels).values())
        assert len(found) < 2, f"{name} {labels} matches {len(found)} series"
        return found[0] if found else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Values of that name by one label."""
        return {
            dict(found).get(label, ""): value
            for found, value in self.matching(name, **labels).items()
        }


def scrape(collector: Collects) -> Exposition:
    """Collect, encode and parse once."""
    return Exposition.of_text(generate_latest(collector).decode())
