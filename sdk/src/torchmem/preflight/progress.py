"""How far a run is, told after every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The state after optimizer step `step` of `steps_wanted`: bytes of the fullest card, the most so far."""

    step: int
    steps_wanted: int
    peak_allocated: int
    peak_reserved: int
