"""The demo's screen: one row per rank, read from the exporter's /metrics as Prometheus reads it."""

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

SCRAPE_TIMEOUT_SECONDS = 5
GIB, MIB = 1 << 30, 1 << 20
BAR_WIDTH = 20
STATE_STYLES = {
    "running": "green",
    "stalled": "yellow",
    "exited": "dim",
    "failed": "red",
    "oom": "bold red",
    "killed": "red",
}
OOM_CAUSES = {
    "capacity": "the whole card is in use.",
    "external": "other processes hold the memory.",
    "limit": "the process has reached its memory fraction.",
    "pending": "a block that fits still waited for another stream.",
    "library": "a library got no memory from the driver.",
}
# As `fragmentation_ratio` in the thresholds of the alerts.
SEVERE_FRAGMENTATION = 0.7


@dataclass(frozen=True, slots=True)
class RankReading:
    """The values of one rank, in bytes where they are sizes. None: not exported."""

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
    """The samples of one scrape, by metric name."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    @classmethod
    def scrape(cls, url: str) -> Exposition:
        """Read /metrics of the exporter at `url`. Raise OSError."""
        address = f"{url}/metrics"
        with urllib.request.urlopen(address, timeout=SCRAPE_TIMEOUT_SECONDS) as response:  # noqa: S310
            return cls(response.read().decode())

    def sum(self, spec: MetricSpec, pid: str, **labels: str) -> float | None:
        """Return the sum of a process's series with these labels, or None if there is none."""
        selector = {"pid": pid, **labels}.items()
        values = [value for series, value in self._samples[spec.name] if selector <= series.items()]
        return sum(values) if values else None

    def pids(self) -> set[int]:
        """Return the ids of all processes in the scrape."""
        return {int(labels["pid"]) for labels, _ in self._samples[catalog.PROCESS_STATE.name]}

    def ranks(self, pids: Iterable[int]) -> list[RankReading]:
        """Return the readings of those of these processes that the scrape has, by rank."""
        selected = {str(pid) for pid in pids}
        states = [labels for labels, value in self._samples[catalog.PROCESS_STATE.name] if value]
        states.sort(key=lambda labels: int(labels["rank"]))
        return [self._rank(labels) for labels in states if labels["pid"] in selected]

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
                series["cause"]
                for series, value in self._samples[catalog.OOMS.name]
                if series["pid"] == pid and value
            ),
        )


@dataclass(frozen=True, slots=True)
class Heading:
    """The text around the table. `url` is the exporter's; times are in seconds."""

    title: str
    url: str
    elapsed: float
    duration: float


def screen(heading: Heading, ranks: Sequence[RankReading]) -> RenderableType:
    """Return the whole screen."""
    footer = Text.assemble(
        (f"{heading.elapsed:4.0f} s of {heading.duration:.0f}   ", "dim"),
        (heading.url, "bold cyan"),
        ("   Ctrl-C stops the demo", "dim"),
    )
    messages = [message for rank in ranks if (message := _oom_message(rank))]
    return Panel(
        Group(_table(ranks), _legend(), Text(), *messages, Text(), footer),
        title=heading.title,
        border_style="blue",
        padding=(1, 2),
    )


def plain(heading: Heading, ranks: Sequence[RankReading]) -> str:
    """Return one line per rank, for output that is not a terminal."""
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
    table.add_column("memory of the card", width=BAR_WIDTH)
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
    """Return a bar of the card's allocated, stranded, releasable and remaining memory, to scale."""
    if not rank.total or rank.allocated is None or rank.reserved is None:
        return Text("–", style="dim")
    cached = rank.reserved - rank.allocated
    stranded = min(rank.stranded or 0, cached)
    bar = Text()
    for size, style in (
        (rank.allocated, "blue"),
        (stranded, "red"),
        (cached - stranded, "yellow"),
    ):
        bar.append("█" * round(BAR_WIDTH * size / rank.total), style=style)
    return bar.append("░" * max(0, BAR_WIDTH - len(bar)), style="dim")


def _legend() -> Text:
    return Text.assemble(
        "      ",
        ("█ ", "blue"),
        ("allocated  ", "dim"),
        ("█ ", "red"),
        ("stranded  ", "dim"),
        ("█ ", "yellow"),
        ("releasable  ", "dim"),
        ("░ ", "dim"),
        ("not reserved by PyTorch", "dim"),
    )


def _oom_message(rank: RankReading) -> Text | None:
    if rank.state != "oom" or not rank.oom_causes:
        return None
    return Text.assemble(
        (f"rank {rank.rank} is out of memory: ", "bold red"),
        _requested(rank.last_oom_requested),
        (" ".join(_cause(rank, cause) for cause in rank.oom_causes), "bold"),
    )


def _requested(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:.0f} MiB requested, "


def _cause(rank: RankReading, cause: str) -> str:
    if cause == "fragmentation":
        return f"{_gib(rank.stranded)} free, but in smaller pieces between live blocks."
    return OOM_CAUSES[cause]


def _fragmentation(value: float | None) -> Text:
    severe = value is not None and value > SEVERE_FRAGMENTATION
    return Text(_ratio(value), style="bold red" if severe else "")


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value / GIB:.1f} GiB"


def _ratio(value: float | None) -> str:
    """Return the ratio, rounded down because the fragmentation index is always below 1."""
    return "–" if value is None else f"{math.floor(value * 100) / 100:.2f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
