"""Lists about an OutOfMemoryError: who requested the memory, what held it, what to record."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchmem.explain.held_lines import held_lines
from torchmem.explain.offer import offer
from torchmem.explain.oom_report import OomReport
from torchmem.explain.tensor_lines import tensor_lines
from torchmem.explain.where import where


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines of text under their title."""

    title: str
    lines: tuple[str, ...]


def program_lines(report: OomReport) -> Iterator[str]:
    """Yield what tells about the program: its lines, its tensors, and its call stack."""
    yield from held_lines(report)
    yield from tensor_lines(report)
    yield from where(report)


def oom_lines(report: OomReport) -> Iterator[str]:
    """Yield the lines of all lists."""
    yield from program_lines(report)
    yield from offer(report)


def listings(lines: Iterable[str]) -> list[Listing]:
    """Return lines of text under their titles, which are the lines without an indent."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if not line.startswith(" "):
            found.append((line, []))
        elif found:
            found[-1][1].append(line)
    return [Listing(title, _dedented(below)) for title, below in found if below]


def _dedented(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(textwrap.dedent("\n".join(lines)).split("\n"))
