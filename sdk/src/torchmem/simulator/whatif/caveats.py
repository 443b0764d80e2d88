"""What a replay cannot know, said in words beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.core.sizes import format_size
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif.case import Case
from torchmem.simulator.whatif.fidelity import met_limit, reserved_over_time
from torchmem.simulator.whatif.rebuild import Before
from torchmem.simulator.whatif.repetition import Repetition
from torchmem.simulator.whatif.result import CardSource, Fidelity

ALWAYS = (
    (
        "The program is taken to ask for the same sizes in the same order, and to free them at the same moments, "
        "whatever the setting; a program that looks at its free memory would not."
    ),
    (
        "The driver is taken to give exactly what it is asked for. Time is not replayed: what mapping pages or waiting "
        "for the GPU costs shows only in the number of driver calls."
    ),
    "A call of torch.cuda.empty_cache() that found nothing to give back left no trace, and is not repeated.",
)


def caveats(
    case: Case, repetition: Repetition, fidelity: Fidelity, card_bytes: int | None, source: CardSource | None
) -> tuple[str, ...]:
    """Sentences, the gravest first; `card_bytes` is the card that was replayed on."""
    recording, before = case.recording, case.before
    return (
        *_card(recording, before, repetition, card_bytes, source),
        *_start(recording, before),
        *_misses(fidelity),
        *ALWAYS,
    )


def _card(
    recording: Recording, before: Before, repetition: Repetition, card_bytes: int | None, source: CardSource | None
) -> Iterator[str]:
    if card_bytes is None:
        yield (
            "How much memory PyTorch could get is not known, so nothing can run out of it: peak reserved is what each "
            "setting needs to run without a retry."
        )
    elif source == "oom" and (most := max(reserved_over_time(recording, before))) > card_bytes:
        yield (
            f"When the request failed PyTorch could get {format_size(card_bytes)}, but it had had {format_size(most)} "
            "before: somebody else took memory meanwhile. All settings are replayed with the smaller figure throughout."
        )
    elif source == "oom" and _was_limited(recording):
        yield (
            "A request failed although the driver had room: the process has a limit of its own (a memory fraction). "
            f"It is taken to be {format_size(card_bytes)}, the most that was ever reserved; it may be a little higher."
        )
    if repetition.doubtful:
        yield (
            f"Cache was given back {repetition.doubtful:,} times right before a request that needed new memory. This "
            "is taken for torch.cuda.empty_cache(); it may have been the allocator's retry on a full card. The memory "
            "of the card would tell."
        )


def _was_limited(recording: Recording) -> bool:
    return any(event.action == "oom" and met_limit(event) for event in recording.events)


def _start(recording: Recording, before: Before) -> Iterator[str]:
    if before.segments:
        active = sum(segment["active_size"] for segment in before.segments)
        reserved = sum(segment["total_size"] for segment in before.segments)
        yield (
            f"The trace does not begin with the program: {format_size(active)} were in use, {format_size(reserved)} "
            "reserved. Nobody knows where these tensors would lie under other settings, so all are replayed from an "
            "empty allocator that gets them in the order of their addresses, which may be kinder than what really "
            "came before. Your settings are replayed from there as well (recorded, packed), and the others are held "
            "against that."
        )
    if recording.truncated:
        yield "The oldest entries of the trace were overwritten; record with a larger max_entries."


def _misses(fidelity: Fidelity) -> Iterator[str]:
    missed = fidelity.allocations - fidelity.landed
    if fidelity.trusted and missed:
        yield (
            f"{missed:,} of {fidelity.allocations:,} allocations came to lie elsewhere than in the recording, the "
            f"first at event {fidelity.first_miss:,}."
        )
