"""Sections of a page, made of the words and lines that the commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmem.explain.parts import PartBytes, part_words
from torchmem.explain.rank_report import Fact


def paragraph(title: str, *sentences: str) -> dict[str, str]:
    """Return a paragraph under its title."""
    return {"title": title, "text": " ".join(sentences)}


def parts(known: Iterable[PartBytes], unread_steps: int | None) -> list[dict[str, Any]]:
    """Return the parts of a device's memory, see `part_words` for the steps."""
    return [
        {"name": part.name, "label": part_words(part, unread_steps), "bytes": part.bytes}
        for part in known
    ]


def facts(known: Iterable[Fact]) -> list[dict[str, str]]:
    """Return what is known about some subjects."""
    return [{"subject": fact.subject, "text": fact.text} for fact in known]
