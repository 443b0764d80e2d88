"""The text of a page, of which only what has changed since the last page is made again.

prometheus_client writes each series, and the head of each family, when it is first on a page. The
text of its name and labels is kept, so later pages need only the number. The whole text of a family
is kept too, for a page on which none of its values has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from torchmem.metrics.row_family import RowFamily, Values

MAX_KEPT_ROWS = 32_768
"""Of one format. The text of a series takes about half a kilobyte. Beyond that, a family is written
anew for each page."""
_MAX_NUMBERS = 1024
_SPARE_SERIES = 64  # of a family, which have gone and are still kept

_number: Callable[[float], str] = lru_cache(_MAX_NUMBERS)(floatToGoString)

_Lines: TypeAlias = tuple[tuple[str, int], ...]
"""Lines without their numbers, each with the place of the number among the values of its row."""


class Families(CollectorRegistry):
    """Families in the form that prometheus_client's encoders take."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


class PageText:
    """Writes pages in one format, one after another. For one thread at a time.

    `encode` is prometheus_client's encoder, and `end` what it puts at the end of a page.
    """

    def __init__(self, encode: Callable[[CollectorRegistry], bytes], end: bytes = b"") -> None:
        self._encode, self._end = encode, end
        self._kept: dict[str, _FamilyText] = {}

    def write(self, families: Sequence[Metric]) -> bytes:
        """Return the exposition of these families."""
        kept, self._kept = self._kept, {}
        room, parts = MAX_KEPT_ROWS, []
        for family in families:
            if isinstance(family, RowFamily) and (room := room - len(family.rows)) >= 0:
                known = kept.get(family.name) or _FamilyText(self._written)
                self._kept[family.name] = known
                parts.append(known.text(family))
            else:
                parts.append(self._written(family))
        return "".join(parts).encode() + self._end

    def _written(self, family: Metric) -> str:
        """Return the text of a family as prometheus_client writes it."""
        return self._encode(Families([family])).removesuffix(self._end).decode()


class _FamilyText:
    """The text of one family, and of each row that it had on the last page."""

    def __init__(self, write: Callable[[Metric], str]) -> None:
        self._write = write
        self._rows: Sequence[tuple[Hashable, Values]] | None = None
        self._text = ""
        self._heads: tuple[str, ...] = ()
        self._series: dict[Hashable, Any] = {}
        """A row's line without its number or, if it has several values, its sections."""

    def text(self, family: RowFamily) -> str:
        """Return the text of the family."""
        rows = family.rows
        if rows != self._rows:
            self._text = self._of_rows(family) if rows else self._write(family)
            self._rows = rows
            if len(self._series) > len(rows) + _SPARE_SERIES:
                self._series = {key: self._series[key] for key, _ in rows}
        return self._text

    def _of_rows(self, family: RowFamily) -> str:
        """Return the text of the rows, section by section.

        In the text format, the sums and counts of a gauge histogram are sections of their own.
        """
        series: dict[Hashable, Any] = self._series
        rows: Sequence[tuple[Hashable, Any]] = family.rows
        for key, values in rows:
            if key not in series:
                series[key] = self._learn(family, key, values)
        if not isinstance(rows[0][1], tuple):
            lines = [f"{series[key]}{_number(value)}\n" for key, value in rows]
            return self._heads[0] + "".join(lines)
        return "".join(
            head + "".join([_written_lines(series[key][place], values) for key, values in rows])
            for place, head in enumerate(self._heads)
        )

    def _learn(self, family: RowFamily, key: Hashable, values: Values) -> str | tuple[_Lines, ...]:
        """Let prometheus_client write a row whose values are their places, and take it apart."""
        places = tuple(map(float, range(len(values)))) if isinstance(values, tuple) else 0.0
        heads, sections = [""], [list[tuple[str, int]]()]
        for line in self._write(family.of_row(key, places)).split("\n")[:-1]:
            if line.startswith("#"):
                if sections[-1]:
                    heads.append("")
                    sections.append([])
                heads[-1] += f"{line}\n"
            else:
                series, _, place = line.rpartition(" ")
                sections[-1].append((f"{series} ", int(float(place))))
        self._heads = tuple(heads)
        if not isinstance(values, tuple):
            return sections[0][0][0]
        return tuple(tuple(section) for section in sections)


def _written_lines(lines: _Lines, values: tuple[float, ...]) -> str:
    return "".join([f"{series}{_number(values[place])}\n" for series, place in lines])
