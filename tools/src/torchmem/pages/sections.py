"""Sections of a page, made of the words and lines that the commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmem.explain.parts import PartBytes, part_words
from torchmem.explain.remedy import Remedy


def paragraph(title: str, text: str) -> dict[str, str]:
    """Return a paragraph under its title."""
    return {"title": title, "text": text}


def parts(known: Iterable[PartBytes], unread_steps: int | None = None) -> list[dict[str, Any]]:
    """Return the parts of a device's memory, see `part_words` for the steps."""
    return [
        {"name": part.name, "label": part_words(part, unread_steps), "bytes": part.bytes}
        for part in known
    ]


def advice(found: Iterable[Remedy]) -> list[dict[str, Any]]:
    """Return what to do, with the lines to type."""
    return [{"text": remedy.text, "lines": remedy.lines} for remedy in found]
