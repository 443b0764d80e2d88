"""Other allocator settings and other cards: replayed from a run's trace if that is exact, else run.

A replay is exact if it places every allocation at its recorded address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmem.phantom.cards import CATALOG, Card
from torchmem.preflight.options import Options
from torchmem.preflight.result import RunResult, no_verdict_error
from torchmem.preflight.runner import Runner
from torchmem.recording import read
from torchmem.recording.recording import Recording
from torchmem.sample.errors import UsageError
from torchmem.whatif import result as replay
from torchmem.whatif.engine import CardMemory, line_to_type, on_cards, what_if
from torchmem.whatif.recommendation import decide
from torchmem.whatif.settings import (
    COMBINED_DIVISIONS,
    Candidate,
    candidate,
    grid,
    recorded_settings,
)
from torchmem.whatif.text import Progress

Method = Literal["replayed", "rerun"]
MAX_NEARBY_CARDS = 3
"""Cards to compare in each direction, smaller and larger."""
MIN_MEMORY_RATIO = 1.1
"""Neighboring cards of a comparison differ in memory by at least this factor."""


@dataclass(frozen=True, slots=True)
class CardRow:
    """The run on one card. outside: bytes of the card that PyTorch cannot use."""

    card: Card
    result: replay.ReplayResult
    outside: int

    @property
    def headroom(self) -> int:
        """Bytes of the card left at the peak."""
        return self.card.memory_bytes - self.outside - self.result.peak_reserved


@dataclass(frozen=True, slots=True)
class Comparison:
    """settings: each setting on the requested card. cards: the run's settings on each card."""

    method: Method
    settings: replay.WhatIf
    cards: tuple[CardRow, ...]


def compare(
    options: Options, requested: RunResult, traced: RunResult, traced_on: Card, runner: Runner
) -> Comparison:
    """Compare settings and cards.

    requested: the run on the requested card. traced, traced_on: the run whose trace is replayed and
    its card; differs from `requested` only if that run ran out of memory.

    Raises:
        UsageError: the trace cannot be replayed.
    """
    recording, device, card = _recording(traced), traced.fullest_device, options.plan.card
    cards = options.cards or nearby_cards(card)
    with Progress("replaying settings") as progress:
        replayed = what_if(
            recording,
            card_bytes=card.memory_bytes - device.outside,
            total_bytes=card.memory_bytes,
            settings=options.settings or None,
            versions=traced.versions,
            progress=progress,
        )
    if replayed.fidelity.trusted and replayed.fidelity.share == 1:
        memory = traced_on.memory_bytes
        own = CardMemory(traced_on.name, memory - device.outside, memory)
        libraries = device.outside - traced_on.context_bytes
        rows = _replayed_cards(recording, own, cards, libraries, replayed)
        return Comparison("replayed", replayed, rows)
    settings = _rerun_settings(options, recording, requested, runner, replayed.fidelity)
    return Comparison("rerun", settings, _rerun_cards(options, cards, runner))


def nearby_cards(card: Card) -> list[Card]:
    """Return the card with its next smaller and larger neighbor in the catalog, ascending."""
    ascending = sorted(CATALOG, key=lambda each: each.memory_bytes)
    cards = [card]
    for each in reversed(ascending):
        smallest = cards[0].memory_bytes
        if len(cards) <= MAX_NEARBY_CARDS and MIN_MEMORY_RATIO * each.memory_bytes <= smallest:
            cards.insert(0, each)
    limit = len(cards) + MAX_NEARBY_CARDS
    for each in ascending:
        largest = cards[-1].memory_bytes
        if len(cards) < limit and each.memory_bytes >= MIN_MEMORY_RATIO * largest:
            cards.append(each)
    return cards


def _recording(result: RunResult) -> Recording:
    if result.snapshot is None:
        raise UsageError("no trace was recorded, as with an allocator other than PyTorch's own.")
    device = result.fullest_device.device
    for recording in read(result.snapshot):
        if recording.device == device:
            return recording
    raise UsageError(f"the trace has no events on cuda:{device}.")


def _replayed_cards(
    recording: Recording,
    own: CardMemory,
    cards: Sequence[Card],
    libraries: int,
    replayed: replay.WhatIf,
) -> tuple[CardRow, ...]:
    """libraries: bytes outside PyTorch besides the CUDA context, assumed equal on each card."""
    outside = [card.context_bytes + libraries for card in cards]
    memories = [
        CardMemory(card.name, max(1, card.memory_bytes - used), card.memory_bytes)
        for card, used in zip(cards, outside, strict=True)
    ]
    with Progress("replaying GPUs") as progress:
        results = on_cards(recording, own, memories, replayed, progress)
    return tuple(CardRow(*row) for row in zip(cards, results, outside, strict=True))


def _rerun_cards(options: Options, cards: Sequence[Card], runner: Runner) -> tuple[CardRow, ...]:
    """Run the script once per card. Raises the error of a run that has no verdict."""
    rows = []
    for card in cards:
        result = runner.run_captured(replace(options.plan, card=card), f"phantom {card.name}")
        error = no_verdict_error(result)
        if error is not None:
            raise error
        outside = result.fullest_device.outside if result.devices else card.context_bytes
        rows.append(CardRow(card, _as_replay(card.name, "", result), outside))
    return tuple(rows)


def _rerun_settings(
    options: Options,
    recording: Recording,
    requested: RunResult,
    runner: Runner,
    fidelity: replay.Fidelity,
) -> replay.WhatIf:
    """Return what `what_if` would, from one run per setting. Its events are steps."""
    recorded = recorded_settings(recording)
    baseline = _as_replay("recorded", recorded.conf, requested)
    candidates = _candidates(options, recording, recorded)
    others = [_rerun_setting(options, each, runner) for each in candidates]
    verdict = decide(replace(fidelity, reason=None), baseline, others)
    best = next((other for other in others if other.name == verdict.recommended), None)
    line = None if best is None else line_to_type(recording, best.conf, requested.versions)
    device = requested.fullest_device
    return replay.WhatIf(
        recording.name,
        recording.device,
        options.plan.steps,
        device.total - device.outside,
        "given",
        fidelity,
        (baseline, *others),
        replace(verdict, line=line, reasons=()),
    )


def _candidates(options: Options, recording: Recording, recorded: Candidate) -> list[Candidate]:
    if options.settings:
        return [candidate(text or "default", text) for text in dict.fromkeys(options.settings)]
    return grid(recording, recorded, card_known=True, divisions=COMBINED_DIVISIONS)


def _rerun_setting(options: Options, setting: Candidate, runner: Runner) -> replay.ReplayResult:
    if setting.refused is not None:
        return replay.ReplayResult(setting.name, setting.conf, setting.refused)
    plan = replace(options.plan, alloc_conf=setting.conf)
    result = runner.run_captured(plan, f"phantom, {setting.name}")
    error = no_verdict_error(result)
    if error is not None:
        return replay.ReplayResult(
            setting.name, setting.conf, refused=f"With this setting: {error}"
        )
    return _as_replay(setting.name, setting.conf, result)


def _as_replay(name: str, conf: str, result: RunResult) -> replay.ReplayResult:
    """Return a run as the result of a replay. Its events are steps."""
    if not result.devices:
        return replay.ReplayResult(name, conf, refused="It ended before the script used the GPU.")
    device = result.fullest_device
    return replay.ReplayResult(
        name,
        conf,
        start="empty",
        peak_reserved=device.peak_reserved,
        peak_allocated=device.peak_allocated,
        worst_stranded=device.stranded,
        retries=device.retries,
        ooms=device.ooms,
        oom=_failed_request(result) if result.ended == "oom" else None,
        replayed_events=result.steps,
        device_allocs=device.device_allocs,
        timeline=tuple(
            replay.TimelinePoint(step.step, step.peak_reserved, step.peak_allocated, 0)
            for step in device.steps
        ),
    )


def _failed_request(result: RunResult) -> replay.FailedRequest:
    device = result.fullest_device
    return replay.FailedRequest(
        result.steps,
        result.requested_bytes or 0,
        device.peak_reserved,
        device.peak_allocated,
        device.stranded,
    )
