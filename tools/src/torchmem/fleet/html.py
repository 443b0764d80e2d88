"""The report of a fleet as a page in one file."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from torchmem.fleet import markdown
from torchmem.fleet.report import FleetReport
from torchmem.pages.page import Heading, still

_TABLE_LINE = re.compile(r"^\|(.*)\|$")
_CELLS = re.compile(r"(?<!\\)\|")
_ESCAPED = re.compile(r"\\([\\`*_\[\]<>|#~&])")
_STRONG = re.compile(r"\*\*(.+?)\*\*")


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
    return still(heading, words, _tables(words), _styles())


def _styles() -> str:
    return resources.files(__package__).joinpath("page.css").read_text("utf-8")


def _tables(markdown: str) -> str:
    """Return the Markdown of the report as markup: its headings, tables and paragraphs."""
    # The title and the headline, with the empty line between them, are in the page's heading.
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
