"""Bars of memory in characters: their parts add up to the whole bar, in the legend's colors.

Where there are no colors, each part has a letter instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from torchmem.explain.parts import LEGEND, PartBytes
from torchmem.metrics.memory_parts import COMPONENTS, PARTS

GIB = 1 << 30
LETTERS = {name: part.letter for name, part in [*COMPONENTS.items(), *PARTS.items()]}
UNKNOWN_LETTER = "?"
REST = "rest"
"""What a bar shows besides its parts, such as the GPU beside a rank's memory."""
_COLOR = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True, slots=True)
class UseStyle:
    """How a part is drawn: its name for people, its style, and its letter without colors."""

    label: str
    style: Style
    letter: str


class UseStyles:
    """The looks of all parts, from the exporter's legend, else from this version's."""

    def __init__(self, legend: Sequence[tuple[str, str, str]], *, has_colors: bool) -> None:
        self._has_colors = has_colors
        known = [(entry.name, entry.label, entry.color) for entry in LEGEND]
        self._looks = {
            name: UseStyle(label or name, _style(color), LETTERS.get(name, UNKNOWN_LETTER))
            for name, label, color in [*known, *legend]
        }
        self.names = [name for name, _, _ in legend] or [name for name, _, _ in known]

    def of(self, name: str) -> UseStyle:
        """Return the look of a part."""
        return self._looks.get(name, UseStyle(name, Style(), UNKNOWN_LETTER))

    def swatch(self, name: str) -> Text:
        """Return the character that stands for a part in the text beside the bars."""
        look = self.of(name)
        if not self._has_colors:
            return Text.assemble((look.letter, "bold"))
        return Text.assemble(("░" if name == "free" else "■", look.style))

    def bar(self, parts: Sequence[PartBytes], total: int | None, width: int) -> Text:
        """Return a bar of `width` columns for `total` bytes; its parts are to scale."""
        if not total or total < 0:
            return Text("–".ljust(width), style="dim")
        if not self._has_colors:
            return Text("".join(self._letter(name) for name in scaled(parts, total, width)))
        halves = scaled(parts, total, 2 * width)
        bar = Text()
        for left, right in zip(halves[::2], halves[1::2], strict=True):
            bar.append(*self._cell(left, right))
        return bar

    def _letter(self, name: str) -> str:
        return " " if name == REST else self.of(name).letter

    def _cell(self, left: str, right: str) -> tuple[str, Style]:
        """Return the character of two halves. Free memory and the rest have no background."""
        if left == right:
            sign = {"free": "░", REST: " "}.get(left, "█")
            return sign, self.of(left).style
        if left in {"free", REST}:
            return "▐", self.of(right).style
        background = None if right in {"free", REST} else self.of(right).style.color
        return "▌", self.of(left).style + Style(bgcolor=background)


def scaled(parts: Sequence[PartBytes], total: int, width: int) -> list[str]:
    """Return the name of the part in each of `width` columns; parts are rounded to columns."""
    columns: list[str] = []
    end = 0
    for part in parts:
        end += max(0, part.bytes)
        columns += [part.name] * (min(width, round(width * end / total)) - len(columns))
    return columns + [REST] * (width - len(columns))


def gib(size: int | None) -> str:
    """Return a size in GiB without the unit: "61.4", "0.02"."""
    if size is None:
        return "–"
    value = size / GIB
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if 0 < value < 0.1 else f"{value:.1f}"


def _style(color: str) -> Style:
    return Style(color=color) if _COLOR.fullmatch(color) else Style()
