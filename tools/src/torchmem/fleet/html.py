"""The report of a fleet as a page in one file, with pictures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from torchmem.fleet import markdown
from torchmem.fleet.launches import OUTCOMES
from torchmem.fleet.report import Bill, FleetReport
from torchmem.pages.page import Heading, still

MAX_BARS = 15
WIDTH = 1000
LABEL, VALUE = 310, 110
ROW, BAR = 26, 16
MAX_LABEL = 44
KINDS: Mapping[str, str] = {"lost": "Lost", "stranded": "Stranded", "idle": "Idle"}
_TABLE_LINE = re.compile(r"^\|(.*)\|$")
_CELLS = re.compile(r"(?<!\\)\|")
_ESCAPED = re.compile(r"\\([\\`*_\[\]<>|#~&])")
_STRONG = re.compile(r"\*\*(.+?)\*\*")


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a picture: label, the text after the bar, and parts by the class of their color."""

    label: str
    value: str
    parts: Sequence[tuple[str, float]]

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(size for _, size in self.parts)


def page(report: FleetReport, max_rows: int = markdown.MAX_ROWS) -> bytes:
    """Return the page; its tables have at most `max_rows` rows."""
    words = markdown.page(report, max_rows)
    heading = Heading(
        title="GPU memory of the fleet",
        kind="Fleet report",
        state="exited",
        headline=f"{markdown.headline(report)}.",
        about=[words.partition("\n")[0].removeprefix("# GPU memory ")],
    )
    drawn = "".join(_cards(report)) + _tables(words)
    return still(heading, words, drawn, _styles())


def _styles() -> str:
    return resources.files(__package__).joinpath("page.css").read_text("utf-8")


def _cards(report: FleetReport) -> Iterator[str]:
    """Yield the pictures that have something to show."""
    days = [_bar(day.date, day.lost, day.stranded, day.idle) for day in report.by_day]
    if len(days) > 1:
        yield _card("GPU-hours by day", days, KINDS)
    yield from _of_bills("GPU-hours by run", report.by_run, "run")
    yield from _of_bills("GPU-hours by user", report.by_user, "user")
    yield from _of_bills("GPU-hours by team", report.by_team, "team")
    outcomes = report.outcomes()
    ended = [
        Bar(words[0].upper() + words[1:], str(outcomes[name]), [(name, outcomes[name])])
        for name, words in OUTCOMES.items()
        if name in outcomes
    ]
    if ended:
        yield _card("What ended runs", ended, {})
    fits = [
        Bar(
            fit.run,
            f"{fit.need_bytes / fit.total_bytes:.0%} of the GPU",
            [("need", fit.need_bytes / fit.total_bytes)],
        )
        for fit in report.fits[:MAX_BARS]
    ]
    if fits:
        yield _card("What runs with room need at their peak", fits, {}, whole=1.0)


def _of_bills(title: str, bills: Sequence[Bill], name: str) -> Iterator[str]:
    named = [bill for bill in bills if getattr(bill, name) and bill.wasted]
    if named:
        bars = [
            _bar(getattr(bill, name), bill.lost, bill.stranded, bill.idle)
            for bill in named[:MAX_BARS]
        ]
        yield _card(title, bars, KINDS)


def _bar(label: str, lost: float, stranded: float, idle: float) -> Bar:
    parts = [("lost", lost), ("stranded", stranded), ("idle", idle)]
    return Bar(label, markdown.hours(lost + stranded + idle), parts)


def _card(title: str, bars: Sequence[Bar], key: Mapping[str, str], whole: float = 0.0) -> str:
    """Return a card with horizontal bars; a bar of `whole`, or the longest one, is full."""
    whole = whole or max(bar.total for bar in bars) or 1.0
    rows = "".join(_row(bar, number, whole) for number, bar in enumerate(bars))
    height = ROW * len(bars)
    said = html.escape("; ".join(f"{bar.label}: {bar.value}" for bar in bars), quote=True)
    return (
        f'<section class="card"><h2>{html.escape(title)}</h2>{_key(key)}'
        f'<svg class="fleet-picture" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{said}">{rows}</svg></section>\n'
    )


def _key(key: Mapping[str, str]) -> str:
    if not key:
        return ""
    items = (
        f'<span><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{name}" width="10" '
        f'height="10" rx="2"/></svg>{label}</span>'
        for name, label in key.items()
    )
    return f'<p class="fleet-key">{"".join(items)}</p>'


def _row(bar: Bar, number: int, whole: float) -> str:
    y, room = number * ROW, WIDTH - LABEL - VALUE
    label = bar.label if len(bar.label) <= MAX_LABEL else f"{bar.label[: MAX_LABEL - 1]}…"
    drawn = [
        f'<text x="{LABEL - 12}" y="{y + 17}" text-anchor="end">{html.escape(label)}</text>',
        f'<rect class="base" x="{LABEL}" y="{y + 5}" width="{room}" height="{BAR}" rx="3"/>',
    ]
    x = float(LABEL)
    for name, size in bar.parts:
        width = size / whole * room
        if width > 0:
            drawn.append(
                f'<rect class="{name}" x="{x:.1f}" y="{y + 5}" width="{width:.1f}" height="{BAR}">'
                f"<title>{html.escape(f'{bar.label}: {KINDS.get(name, bar.value)}')}</title></rect>"
            )
        x += width
    value = html.escape(bar.value)
    drawn.append(f'<text class="soft" x="{WIDTH - VALUE + 12}" y="{y + 17}">{value}</text>')
    return "".join(drawn)


def _tables(markdown: str) -> str:
    """Return the Markdown of the report as markup: its headings, tables and paragraphs."""
    lines = markdown.split("\n")[3:]
    return f'<section class="card fleet-tables">{"".join(_blocks(lines))}</section>\n'


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    table: list[str] = []
    for line in [*lines, ""]:
        if _TABLE_LINE.match(line):
            table.append(line)
            continue
        if table:
            yield _table(table)
            table = []
        if line.startswith("## "):
            yield f"<h2>{_inline(line[3:])}</h2>"
        elif line:
            yield f"<p>{_inline(line.removeprefix('- '))}</p>"


def _table(lines: Sequence[str]) -> str:
    heading, rule, *rows = ([cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in lines)
    words = [not cell.endswith(":") for cell in rule]
    body = "".join(_cells("td", row, words) for row in rows)
    return (
        f'<div class="fleet-scroll"><table><thead>{_cells("th", heading, words)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(tag: str, cells: Sequence[str], words: Sequence[bool]) -> str:
    drawn = (
        f"<{tag}{' class=words' if left else ''}>{_inline(cell)}</{tag}>"
        for cell, left in zip(cells, words, strict=True)
    )
    return f"<tr>{''.join(drawn)}</tr>"


def _inline(markdown: str) -> str:
    """Return text of Markdown as markup: strong text, and escaped characters as themselves."""
    strong = _STRONG.sub(r"<strong>\1</strong>", html.escape(markdown))
    return _ESCAPED.sub(r"\1", strong)
