"""The cards known by name: shown as a list, and those beside a given one."""

from __future__ import annotations

from collections.abc import Sequence

from torchmem.cli.layout import aligned
from torchmem.core.errors import UsageError
from torchmem.core.sizes import format_size
from torchmem.phantom.cards import CATALOGUE, Card, card

EACH_WAY = 3
CLEARLY = 1.1
"""A card with so many times the memory of another is another choice."""


def listing() -> str:
    """A table of all cards known by name."""
    rows = [("card", "memory", "context", "SMs", "capability")]
    for one in CATALOGUE:
        capability = ".".join(map(str, one.capability))
        sizes = format_size(one.memory_bytes), format_size(one.context_bytes)
        rows.append((one.name, *sizes, str(one.multiprocessors), capability))
    products = ["product", *(one.product for one in CATALOGUE)]
    return "".join(f"{line}  {product}\n" for line, product in zip(aligned(rows), products, strict=True))


def usable(text: str) -> Card:
    """The card of this name or size; raises UsageError when there is none, or no memory beside its context."""
    found = card(text)
    if found.memory_bytes <= found.context_bytes:
        raise UsageError(
            f"a card of {text} has no memory left beside a CUDA context of {format_size(found.context_bytes)}: name a "
            "larger one."
        )
    return found


def beside(asked: Card, known: Sequence[Card] = CATALOGUE) -> list[Card]:
    """The asked card between the next smaller and the next larger ones, in ascending order, each clearly larger."""
    ascending = sorted(known, key=lambda one: one.memory_bytes)
    found = [asked]
    for one in reversed(ascending):
        if len(found) <= EACH_WAY and CLEARLY * one.memory_bytes <= found[0].memory_bytes:
            found.insert(0, one)
    most = len(found) + EACH_WAY
    for one in ascending:
        if len(found) < most and one.memory_bytes >= CLEARLY * found[-1].memory_bytes:
            found.append(one)
    return found
