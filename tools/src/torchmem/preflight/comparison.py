"""Settings and cards tried for real on the phantom, where a replay of the trace would not be exact.

What other settings and other cards would have made of a run: replayed where that is exact, else run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmem.phantom.cards import Card
from torchmem.preflight.attempts import Attempts, failure
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.verdict import requested, tightest
from torchmem.preflight.wanted import Wanted, beside
from torchmem.recording import read
from torchmem.recording.recording import Recording
from torchmem.sample.errors import UsageError
from torchmem.whatif import result as replay
from torchmem.whatif.answer import Progress
from torchmem.whatif.engine import CardMemory, line_to_type, on_cards, what_if
from torchmem.whatif.settings import Candidate, candidate, grid, recorded_settings
from torchmem.whatif.verdict import decide


def rerun_settings(
    wanted: Wanted,
    recording: Recording,
    asked: Outcome,
    attempts: Attempts,
    fidelity: replay.Fidelity,
) -> replay.WhatIf:
    """The answer of `what_if` by real runs; events are steps. `asked`: the run under the settings of the recording."""
    recorded = recorded_settings(recording)
    was = as_replay("recorded", recorded.conf, asked)
    others = [_rerun(wanted, one, attempts) for one in _candidates(wanted, recording, recorded)]
    verdict = decide(replace(fidelity, reason=None), was, was, others)
    best = next((other for other in others if other.name == verdict.recommended), None)
    line = None if best is None else line_to_type(recording, best.conf)
    device = tightest(asked)
    return replay.WhatIf(
        recording.name, recording.device, wanted.plan.steps, device.total - device.outside, "given", fidelity,
        (was, *others), replace(verdict, line=line, reasons=()),
    )  # fmt: skip


def rerun_cards(wanted: Wanted, cards: Sequence[Card], attempts: Attempts) -> list[Outcome]:
    """One run for each card, under the settings of the plan; raises what `failure` says of one that ends otherwise."""
    found = []
    for card in cards:
        outcome = attempts.quietly(replace(wanted.plan, card=card), f"phantom {card.name}")
        error = failure(outcome)
        if error is not None:
            raise error
        found.append(outcome)
    return found


def as_replay(name: str, conf: str, outcome: Outcome) -> replay.ReplayResult:
    """A real run in the words of a replay; its events are steps."""
    if not outcome.devices:
        return replay.ReplayResult(name, conf, refused="It ended before the script used the card.")
    device = tightest(outcome)
    oom = None
    if outcome.ended == "oom":
        oom = replay.FailedRequest(
            outcome.steps,
            requested(outcome, None) or 0,
            device.peak_reserved,
            device.peak_allocated,
            device.stranded,
        )
    return replay.ReplayResult(
        name, conf, start="empty", peak_reserved=device.peak_reserved, peak_allocated=device.peak_allocated,
        worst_stranded=device.stranded, retries=device.retries, ooms=device.ooms, oom=oom,
        replayed_events=outcome.steps, device_allocs=device.device_allocs,
        timeline=tuple(
            replay.TimelinePoint(step.step, step.peak_reserved, step.peak_allocated, 0) for step in device.steps
        ),
    )  # fmt: skip


def _candidates(wanted: Wanted, recording: Recording, recorded: Candidate) -> list[Candidate]:
    if wanted.settings:
        return [candidate(text or "default", text) for text in dict.fromkeys(wanted.settings)]
    return grid(recording, recorded, card_known=True)


def _rerun(wanted: Wanted, one: Candidate, attempts: Attempts) -> replay.ReplayResult:
    if one.refused is not None:
        return replay.ReplayResult(one.name, one.conf, one.refused)
    outcome = attempts.quietly(replace(wanted.plan, alloc_conf=one.conf), f"phantom, {one.name}")
    error = failure(outcome)
    if error is not None:
        return replay.ReplayResult(one.name, one.conf, refused=f"Under it {error}")
    return as_replay(one.name, one.conf, outcome)


Method = Literal["replayed", "rerun"]


@dataclass(frozen=True, slots=True)
class CardRow:
    """What the run would have been on a card; `outcome` is named after it. outside: bytes that PyTorch cannot get."""

    card: Card
    outcome: replay.ReplayResult
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


def compare(
    wanted: Wanted, asked: Outcome, need: Outcome, on: Card, attempts: Attempts
) -> Comparison:
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
    return Comparison(
        "rerun", settings, _comparison_rerun(cards, rerun_cards(wanted, cards, attempts))
    )


def _recording(outcome: Outcome) -> Recording:
    if outcome.snapshot is None:
        raise UsageError("nothing was recorded, as with an allocator other than PyTorch's own.")
    device = tightest(outcome).device
    for recording in read(outcome.snapshot):
        if recording.device == device:
            return recording
    raise UsageError(f"the trace holds nothing of GPU {device}.")


def _replayed(
    recording: Recording,
    own: CardMemory,
    cards: Sequence[Card],
    libraries: int,
    result: replay.WhatIf,
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


def _comparison_rerun(cards: Sequence[Card], outcomes: Sequence[Outcome]) -> tuple[CardRow, ...]:
    rows = []
    for card, outcome in zip(cards, outcomes, strict=True):
        outside = tightest(outcome).outside if outcome.devices else card.context_bytes
        rows.append(CardRow(card, as_replay(card.name, "", outcome), outside))
    return tuple(rows)
