"""What the demo's screen shows: rows read from the exporter's own /metrics, as Prometheus would read it.

The demo's live screen: one line for each rank, and the news in words below.
"""

from __future__ import annotations

import math
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec

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
                found["cause"]
                for found, value in self._samples[catalog.OOMS.name]
                if found["pid"] == pid and value
            ),
        )


GIB, MIB = 1 << 30, 1 << 20
BAR_WIDTH = 20
CAUSES = {
    "capacity": "all of the card is in use.",
    "external": "other processes hold what it needs.",
    "limit": "this process may not take more.",
}
STATE_STYLES = {
    "running": "green",
    "stalled": "yellow",
    "exited": "dim",
    "oom": "bold red",
    "killed": "red",
}
# The alert's own mark for severe fragmentation; see prometheus/thresholds.yml.
SEVERE_FRAGMENTATION = 0.7


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands above and below the table. `url` is the exporter's; times in seconds."""

    title: str
    url: str
    elapsed: float
    duration: float


def screen(heading: Heading, ranks: Sequence[RankReading]) -> RenderableType:
    """The whole screen."""
    table = _table(ranks)
    news = [line for rank in ranks if (line := _news(rank))]
    footer = Text.assemble(
        (f"{heading.elapsed:4.0f} s of {heading.duration:.0f}   ", "dim"),
        (f"{heading.url}/metrics", "bold cyan"),
        ("   Ctrl-C ends everything", "dim"),
    )
    return Panel(
        Group(table, _legend(), Text(), *news, Text(), footer),
        title=heading.title,
        border_style="blue",
        padding=(1, 2),
    )


def plain(heading: Heading, ranks: Sequence[RankReading]) -> str:
    """One line for each rank, where the output is no terminal."""
    return "\n".join(f"{heading.elapsed:5.0f} s  rank {rank.rank} {_line(rank)}" for rank in ranks)


def _line(rank: RankReading) -> str:
    return (
        f"{rank.state:8} allocated {_gib(rank.allocated):>9}  reserved {_gib(rank.reserved):>9}"
        f"  stranded {_gib(rank.stranded):>9}  headroom {_gib(rank.headroom):>9}"
        f"  FI {_ratio(rank.fragmentation)}  retries {_count(rank.retries)}  OOMs {rank.ooms:.0f}"
    )


def _table(ranks: Sequence[RankReading]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("memory of its card", width=BAR_WIDTH)
    for name in ("allocated", "reserved", "stranded", "headroom", "FI", "retries"):
        table.add_column(name, justify="right", min_width=9)
    table.add_column("state")
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            _bar(rank),
            _gib(rank.allocated),
            _gib(rank.reserved),
            _gib(rank.stranded),
            _gib(rank.headroom),
            _fragmentation(rank.fragmentation),
            _count(rank.retries),
            Text(rank.state, style=STATE_STYLES.get(rank.state, "")),
        )
    return table


def _bar(rank: RankReading) -> Text:
    """Allocated, stranded, other cached and free memory of the card, to scale."""
    if not rank.total or rank.allocated is None or rank.reserved is None:
        return Text("–", style="dim")
    allocated, stranded = rank.allocated, min(rank.stranded or 0, rank.reserved - rank.allocated)
    parts = [
        (allocated, "█", "blue"),
        (stranded, "█", "red"),
        (rank.reserved - allocated - stranded, "█", "yellow"),
    ]
    bar = Text()
    for size, sign, style in parts:
        bar.append(sign * round(BAR_WIDTH * size / rank.total), style=style)
    return bar.append("░" * max(0, BAR_WIDTH - len(bar)), style="dim")


def _legend() -> Text:
    return Text.assemble(
        "      ", ("█ ", "blue"), ("allocated  ", "dim"), ("█ ", "red"), ("stranded  ", "dim"),
        ("█ ", "yellow"), ("cached, can be released  ", "dim"), ("░ ", "dim"), ("not PyTorch's", "dim"),
    )  # fmt: skip


def _news(rank: RankReading) -> Text | None:
    if rank.state != "oom" or rank.last_oom_requested is None:
        return None
    return Text.assemble(
        (f"rank {rank.rank} is out of memory: ", "bold red"),
        f"{rank.last_oom_requested / MIB:.0f} MiB requested, ",
        (" ".join(_cause(rank, cause) for cause in rank.oom_causes), "bold"),
    )


def _cause(rank: RankReading, cause: str) -> str:
    if cause == "fragmentation":
        return f"{_gib(rank.stranded)} free, but in smaller pieces between live blocks."
    return CAUSES[cause]


def _fragmentation(value: float | None) -> Text:
    severe = value is not None and value > SEVERE_FRAGMENTATION
    return Text(_ratio(value), style="bold red" if severe else "")


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value / GIB:.1f} GiB"


def _ratio(value: float | None) -> str:
    """Cut, not rounded: the index never reaches 1."""
    return "–" if value is None else f"{math.floor(value * 100) / 100:.2f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
