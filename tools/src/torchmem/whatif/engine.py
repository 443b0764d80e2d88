"""What a recorded program would have done under other allocator settings.

What a recorded program would have done on other cards, under its own settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmem.allocator.remedies import export_line
from torchmem.allocator.settings import (
    LAST_PARSED,
    REQUEST_SETTINGS,
    AllocatorConfig,
    parse_alloc_conf,
)
from torchmem.recording.recording import Recording
from torchmem.sample.errors import UsageError
from torchmem.whatif.fidelity import Progress, Work, caveats, repeat_best, survey
from torchmem.whatif.rebuild import Before, Case
from torchmem.whatif.repetition import repeat
from torchmem.whatif.replay import Program, Replayer, outcome
from torchmem.whatif.result import Fidelity, Recommendation, ReplayResult, Start, WhatIf
from torchmem.whatif.settings import Candidate, candidate, grid
from torchmem.whatif.verdict import decide

PACKED = "recorded, packed"
OTHER_CARD = "recorded, this card"
"""Names of the row with the recorded settings that a replay on other terms is held against."""


def what_if(
    recording: Recording,
    *,
    card_bytes: int | None = None,
    total_bytes: int | None = None,
    settings: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,  # noqa: ARG005
) -> WhatIf:
    """Replay a recording under its own settings, and under others if that repeats it.

    Args:
        recording: one device of one snapshot.
        card_bytes: what PyTorch can get of the card's memory, in bytes, without the CUDA context and what others hold;
            an OOM in the trace knows better.
        total_bytes: all memory of the card, of which a memory fraction is a part; `card_bytes` if not given.
        settings: texts as in PYTORCH_CUDA_ALLOC_CONF to try in place of the usual ones.
        progress: told how far it is, a few hundred times for each replay.

    Raises:
        UsageError: the snapshot holds settings that no PyTorch writes, `card_bytes` is not positive, or there is
            nothing to replay.
    """
    if (card_bytes is not None and card_bytes <= 0) or (
        total_bytes is not None and total_bytes <= 0
    ):
        raise UsageError("The memory of the card must be more than 0 bytes.")
    ground = survey(recording, card_bytes, total_bytes)
    recorded, before, card = ground.recorded, ground.case.before, ground.card
    candidates = _candidates(recording, recorded, settings, card_known=card is not None)
    work = Work(progress, max(1, len(recording.events)), 3 + len(candidates))
    repetition, fidelity, oldest_first = repeat_best(ground.case, work)
    start: Start = "recorded" if before.segments else "empty"
    was = outcome("recorded", recorded.conf, start, repetition.player, len(recording.events))
    outcomes = [was]
    if fidelity.trusted:
        replayer = Replayer(
            repetition.program,
            before,
            len(recording.events),
            card,
            total_bytes,
            oldest_first,
            work.on_sample,
        )
        baseline = _baseline(before, is_own=ground.is_own or card is None)
        outcomes += _replay(
            replayer,
            None if baseline is None else replace(recorded, name=baseline),
            candidates,
            work,
        )
    verdict = _decide(recording, fidelity, outcomes)
    said = caveats(ground.case, repetition, fidelity, card, ground.source)
    return WhatIf(
        recording.name,
        recording.device,
        len(recording.events),
        card,
        ground.source,
        fidelity,
        tuple(outcomes),
        verdict,
        said,
    )


def _candidates(
    recording: Recording, recorded: Candidate, settings: Sequence[str] | None, *, card_known: bool
) -> list[Candidate]:
    if settings is None:
        return grid(recording, recorded, card_known=card_known)
    return [
        candidate(text or "default", text, card_known=card_known)
        for text in dict.fromkeys(settings)
    ]


def _baseline(before: Before, *, is_own: bool) -> str | None:
    """Name of the row that all others are held against; None when that is the recording itself."""
    if before.segments:
        return PACKED
    return None if is_own else OTHER_CARD


def _replay(
    replayer: Replayer, baseline: Candidate | None, candidates: Sequence[Candidate], work: Work
) -> list[ReplayResult]:
    outcomes = []
    if baseline is not None:
        outcomes.append(replayer.replay(baseline.name, baseline.conf, baseline.config))
    work.next()
    for one in candidates:
        if one.refused is None:
            outcomes.append(replayer.replay(one.name, one.conf, one.config))
        else:
            outcomes.append(ReplayResult(one.name, one.conf, one.refused))
        work.next()
    return outcomes


def _decide(
    recording: Recording, fidelity: Fidelity, outcomes: Sequence[ReplayResult]
) -> Recommendation:
    recorded, *others = outcomes
    baseline = others.pop(0) if others and others[0].name in {PACKED, OTHER_CARD} else recorded
    verdict = decide(fidelity, recorded, baseline, others)
    best = next((other for other in others if other.name == verdict.recommended), None)
    return verdict if best is None else replace(verdict, line=line_to_type(recording, best.conf))


def line_to_type(recording: Recording, conf: str) -> str:
    """What sets `conf`, and what else is set and has nothing to do with it."""
    present = parse_alloc_conf(str(recording.settings.get(LAST_PARSED.upper()) or ""))
    kept = {
        key: value
        for key, value in present.items()
        if key not in REQUEST_SETTINGS - {"per_process_memory_fraction"}
    }
    return export_line(kept | parse_alloc_conf(conf))


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A card to try: `obtainable` bytes for PyTorch of `total` bytes."""

    name: str
    obtainable: int
    total: int


def on_cards(
    recording: Recording,
    own: CardMemory,
    cards: Sequence[CardMemory],
    answer: WhatIf,
    progress: Progress = lambda done, total: None,  # noqa: ARG005
) -> tuple[ReplayResult, ...]:
    """One outcome for each of `cards`, named after it.

    Args:
        recording: one device of one snapshot.
        own: the card that it was recorded on.
        cards: those to replay it on.
        answer: of `what_if` for the same recording, with a trusted fidelity.
        progress: told how far it is.

    Raises:
        UsageError: as `what_if`.
    """
    ground = survey(recording, own.obtainable, own.total)
    work = Work(progress, max(1, len(recording.events)), 1 + len(cards))
    newer = answer.fidelity.oldest_segment_first is not False
    program: Program | None = None
    free, found = answer.outcomes[0], dict[str, ReplayResult]()
    for card in sorted(cards, key=lambda one: one.obtainable, reverse=True):
        if _is_same(free, ground.recorded.config, card):
            found[card.name] = replace(free, name=card.name)
            continue
        program = program or _program(ground.case, work, newer=newer)
        replayer = Replayer(
            program,
            ground.case.before,
            len(recording.events),
            card.obtainable,
            card.total,
            newer,
            work.on_sample,
        )
        found[card.name] = replayer.replay(card.name, ground.recorded.conf, ground.recorded.config)
        free = free if _is_free(free) else found[card.name]
        work.next()
    return tuple(found[card.name] for card in cards)


def _program(case: Case, work: Work, *, newer: bool) -> Program:
    misses = len(case.recording.events)
    repetition = repeat(
        case, oldest_segment_first=newer, most_misses=misses, on_sample=work.on_sample
    )
    work.next()
    return repetition.program


def _is_same(free: ReplayResult, config: AllocatorConfig, card: CardMemory) -> bool:
    """Whether a card shows what `free` did: that one never met a limit, and there is room for it."""
    return (
        _is_free(free)
        and config.per_process_memory_fraction == 1
        and free.peak_reserved <= card.obtainable
    )


def _is_free(outcome: ReplayResult) -> bool:
    return not (outcome.retries or outcome.ooms)
