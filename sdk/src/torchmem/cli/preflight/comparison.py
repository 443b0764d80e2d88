"""What other settings and other cards would have made of a run: replayed where that is exact, else run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchmem.cli.preflight.attempts import Attempts
from torchmem.cli.preflight.catalogue import beside
from torchmem.cli.preflight.rerun import as_replay, rerun_cards, rerun_settings
from torchmem.cli.preflight.verdict import tightest
from torchmem.cli.preflight.wanted import Wanted
from torchmem.cli.whatif.progress import Progress
from torchmem.core.errors import UsageError
from torchmem.phantom.cards import Card
from torchmem.preflight.outcome import Outcome
from torchmem.simulator.recording import read
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif import result as replay
from torchmem.simulator.whatif.cards import CardMemory, on_cards
from torchmem.simulator.whatif.engine import what_if

Method = Literal["replayed", "rerun"]


@dataclass(frozen=True, slots=True)
class CardRow:
    """What the run would have been on a card; `outcome` is named after it. outside: bytes that PyTorch cannot get."""

    card: Card
    outcome: replay.Outcome
    outside: int

    @property
    def headroom(self) -> int:
        """Bytes of the card that were never needed."""
        return self.card.memory_bytes - self.outside - self.outcome.peak_reserved


@dataclass(frozen=True, slots=True)
class Comparison:
    """settings: one outcome for each setting on the card asked for. cards: the settings of the run on each card."""

    method: Method
    settings: replay.WhatIf
    cards: tuple[CardRow, ...]


def compare(wanted: Wanted, asked: Outcome, need: Outcome, on: Card, attempts: Attempts) -> Comparison:
    """Compare settings and cards.

    asked: the run on the card asked for. need: the run whose trace is replayed, on the card `on`; the same as `asked`
    unless that ran out of memory.

    Raises:
        UsageError: the trace cannot be replayed.
    """
    recording, device, card = _recording(need), tightest(need), wanted.plan.card
    cards, total = wanted.cards or beside(card), card.memory_bytes
    with Progress("replaying settings") as progress:
        result = what_if(
            recording, card_bytes=total - device.outside, total_bytes=total, settings=wanted.settings or None,
            progress=progress,
        )  # fmt: skip
    libraries = device.outside - on.context_bytes
    if result.fidelity.trusted and result.fidelity.share == 1:
        own = CardMemory(on.name, on.memory_bytes - device.outside, on.memory_bytes)
        return Comparison("replayed", result, _replayed(recording, own, cards, libraries, result))
    settings = rerun_settings(wanted, recording, asked, attempts, result.fidelity)
    return Comparison("rerun", settings, _rerun(cards, rerun_cards(wanted, cards, attempts)))


def _recording(outcome: Outcome) -> Recording:
    if outcome.snapshot is None:
        raise UsageError("nothing was recorded, as with an allocator other than PyTorch's own.")
    device = tightest(outcome).device
    for recording in read(outcome.snapshot):
        if recording.device == device:
            return recording
    raise UsageError(f"the trace holds nothing of GPU {device}.")


def _replayed(
    recording: Recording, own: CardMemory, cards: Sequence[Card], libraries: int, result: replay.WhatIf
) -> tuple[CardRow, ...]:
    """`libraries`: bytes that they took of the card beside its context, and would take of each."""
    outside = [one.context_bytes + libraries for one in cards]
    memories = [
        CardMemory(one.name, max(1, one.memory_bytes - used), one.memory_bytes)
        for one, used in zip(cards, outside, strict=True)
    ]
    with Progress("replaying cards") as progress:
        outcomes = on_cards(recording, own, memories, result, progress)
    return tuple(CardRow(*row) for row in zip(cards, outcomes, outside, strict=True))


def _rerun(cards: Sequence[Card], outcomes: Sequence[Outcome]) -> tuple[CardRow, ...]:
    rows = []
    for card, outcome in zip(cards, outcomes, strict=True):
        outside = tightest(outcome).outside if outcome.devices else card.context_bytes
        rows.append(CardRow(card, as_replay(card.name, "", outcome), outside))
    return tuple(rows)
