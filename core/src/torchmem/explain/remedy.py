"""A remedy: one thing to do, what it gains, and the one order in which all screens show several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchmem.allocator.sizes import format_size
from torchmem.sample.remedy_words import RemedyKind


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do: a sentence, lines to type, and the allocator setting with its new value.

    `kind` is what all screens call it; None in the answer of an exporter that does not tell it.
    `gain_bytes` is the room that it makes beyond the failed request, and `gain_steps` the steps
    that fit into it where memory grows; both are None if unknown. They are estimates. `waits`:
    whether the failed request would have succeeded a moment later, with nothing else changed.
    """

    kind: RemedyKind | None = None
    text: str = ""
    lines: tuple[str, ...] = ()
    setting: str | None = None
    value: str | None = None
    gain_bytes: int | None = None
    gain_steps: float | None = None
    waits: bool = False


def in_order(found: Iterable[Remedy]) -> tuple[Remedy, ...]:
    """Return remedies without duplicates, the most promising first.

    Waiting comes first, then the largest gain, then those without a gain, as they were.
    """
    unique: dict[str, Remedy] = {}
    for remedy in sorted(found, key=lambda remedy: (not remedy.waits, -(remedy.gain_bytes or 0))):
        unique.setdefault(remedy.text, remedy)
    return tuple(unique.values())


def gain_sentence(remedy: Remedy) -> str:
    """Return what a remedy gains, as a sentence after its text; empty if that is unknown."""
    if remedy.gain_bytes is None:
        return ""
    size = format_size(remedy.gain_bytes)
    if remedy.gain_steps is None:
        return f" Gains about {size}."
    steps = int(remedy.gain_steps)
    return f" Gains about {size}, {steps:,} step{'s' * (steps != 1)} (an estimate)."
