"""What a recorded program would have done on other cards, under its own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif.case import Case
from torchmem.simulator.whatif.ground import Progress, Work, survey
from torchmem.simulator.whatif.program import Program
from torchmem.simulator.whatif.repetition import repeat
from torchmem.simulator.whatif.replay import Replayer
from torchmem.simulator.whatif.result import Outcome, WhatIf


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
) -> tuple[Outcome, ...]:
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
    free, found = answer.outcomes[0], dict[str, Outcome]()
    for card in sorted(cards, key=lambda one: one.obtainable, reverse=True):
        if _is_same(free, ground.recorded.config, card):
            found[card.name] = replace(free, name=card.name)
            continue
        program = program or _program(ground.case, work, newer=newer)
        replayer = Replayer(
            program, ground.case.before, len(recording.events), card.obtainable, card.total, newer, work.on_sample
        )
        found[card.name] = replayer.replay(card.name, ground.recorded.conf, ground.recorded.config)
        free = free if _is_free(free) else found[card.name]
        work.next()
    return tuple(found[card.name] for card in cards)


def _program(case: Case, work: Work, *, newer: bool) -> Program:
    misses = len(case.recording.events)
    repetition = repeat(case, oldest_segment_first=newer, most_misses=misses, on_sample=work.on_sample)
    work.next()
    return repetition.program


def _is_same(free: Outcome, config: AllocatorConfig, card: CardMemory) -> bool:
    """Whether a card shows what `free` did: that one never met a limit, and there is room for it."""
    return _is_free(free) and config.per_process_memory_fraction == 1 and free.peak_reserved <= card.obtainable


def _is_free(outcome: Outcome) -> bool:
    return not (outcome.retries or outcome.ooms)
