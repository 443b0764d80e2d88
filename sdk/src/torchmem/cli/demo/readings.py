"""What the demo's screen shows: rows read from the exporter's own /metrics, as Prometheus would read it."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from torchmem.core import catalog
from torchmem.core.catalog import MetricSpec

TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank as the screen shows it; bytes, and None for what is not exported."""

    rank: int
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
    oom_causes: tuple[str, ...] = ()


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

    def sum(self, spec: MetricSpec, pid: str, **labels: str) -> float | None:
        """Sum of a metric over one process's series with these labels; None when there is none."""
        wanted = {"pid": pid, **labels}.items()
        values = [value for found, value in self._samples[spec.name] if wanted <= found.items()]
        return sum(values) if values else None

    def pids(self) -> set[int]:
        """Processes that are served."""
        return {int(labels["pid"]) for labels, _ in self._samples[catalog.PROCESS_STATE.name]}

    def ranks(self, pids: Iterable[int]) -> list[RankReading]:
        """Those of these processes that are served, by rank."""
        wanted = {str(pid) for pid in pids}
        states = [labels for labels, value in self._samples[catalog.PROCESS_STATE.name] if value]
        return [self._rank(labels) for labels in sorted(states, key=lambda labels: int(labels["rank"]))
                if labels["pid"] in wanted]  # fmt: skip

    def _rank(self, labels: dict[str, str]) -> RankReading:
        pid = labels["pid"]
        return RankReading(
            rank=int(labels["rank"]),
            state=labels["state"],
            total=self.sum(catalog.DEVICE_TOTAL, pid),
            allocated=self.sum(catalog.ALLOCATED, pid),
            reserved=self.sum(catalog.RESERVED, pid),
            stranded=self.sum(catalog.FREE, pid, state="stranded"),
            headroom=self.sum(catalog.HEADROOM, pid, flush="true"),
            fragmentation=self.sum(catalog.FRAGMENTATION, pid),
            retries=self.sum(catalog.ALLOC_RETRIES, pid),
            ooms=self.sum(catalog.OOMS, pid) or 0,
            last_oom_requested=self.sum(catalog.LAST_OOM_REQUESTED, pid),
            oom_causes=tuple(
                found["cause"] for found, value in self._samples[catalog.OOMS.name] if found["pid"] == pid and value
            ),
        )
