"""What the demo's screen shows: rows read from the exporter's own /metrics, as Prometheus would read it."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from torchmem.core import catalog
from torchmem.core.catalog import MetricSpec

TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank as the screen shows it; bytes, and None for what is not exported."""

    rank: int
    gpu: str
    state: str
    total: float | None
    allocated: float | None
    reserved: float | None
    stranded: float | None
    headroom: float | None
    fragmentation: float | None
    retries: float | None
    ooms: float
    last_oom_requested: float | None


class Exposition:
    """Samples of one scrape, by metric name."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    @classmethod
    def scrape(cls, url: str) -> Exposition:
        """Read /metrics of the exporter at `url`; raises OSError."""
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 - our own server
            return cls(answer.read().decode())

    def sum(self, spec: MetricSpec, rank: str, **labels: str) -> float | None:
        """Sum of a metric over one rank's series with these labels; None when there is none."""
        wanted = {"rank": rank, **labels}.items()
        values = [value for found, value in self._samples[spec.name] if wanted <= found.items()]
        return sum(values) if values else None

    def ranks(self) -> list[RankReading]:
        """All ranks that are served, in order."""
        on = [(labels["rank"], labels["state"]) for labels, value in self._samples[catalog.PROCESS_STATE.name] if value]
        return [self._rank(rank, state) for rank, state in sorted(on, key=lambda item: int(item[0]))]

    def _rank(self, rank: str, state: str) -> RankReading:
        gpus = [
            labels.get("gpu", "") for labels, _ in self._samples[catalog.DEVICE_TOTAL.name] if labels["rank"] == rank
        ]
        return RankReading(
            rank=int(rank),
            gpu=gpus[0] if gpus else "",
            state=state,
            total=self.sum(catalog.DEVICE_TOTAL, rank),
            allocated=self.sum(catalog.ALLOCATED, rank),
            reserved=self.sum(catalog.RESERVED, rank),
            stranded=self.sum(catalog.FREE, rank, state="stranded"),
            headroom=self.sum(catalog.HEADROOM, rank, flush="true"),
            fragmentation=self.sum(catalog.FRAGMENTATION, rank),
            retries=self.sum(catalog.ALLOC_RETRIES, rank),
            ooms=self.sum(catalog.OOMS, rank) or 0,
            last_oom_requested=self.sum(catalog.LAST_OOM_REQUESTED, rank),
        )
