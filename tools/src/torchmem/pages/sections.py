"""Sections of a page, made of the words and lines that the commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmem.explain.memory_use import MemoryUse
from torchmem.explain.rank_report import Fact


def paragraph(title: str, *sentences: str) -> dict[str, str]:
    """Return a paragraph under its title."""
    return {"title": title, "text": " ".join(sentences)}


def parts(uses: Iterable[MemoryUse]) -> list[dict[str, Any]]:
    """Return the parts of a device's memory."""
    return [{"name": use.name, "label": use.label, "bytes": use.bytes} for use in uses]


def facts(known: Iterable[Fact]) -> list[dict[str, str]]:
    """Return what is known about some subjects."""
    return [{"subject": fact.subject, "text": fact.text} for fact in known]
