"""How well a recording can be repeated: under which rule, on which card, and whether that is enough for a verdict.

What a replay cannot know, said in words beside its numbers.

What all replays of one recording have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torchmem.allocator.sizes import LARGE_BUFFER, format_size
from torchmem.recording.recording import Event, Recording
from torchmem.whatif.rebuild import Before, Case, rebuild
from torchmem.whatif.repetition import Repetition, repeat
from torchmem.whatif.result import CardSource, Fidelity
from torchmem.whatif.settings import Candidate, recorded_settings
from torchmem.whatif.verdict import MARGIN

LEAST_SHARE = 0.95
"""Each wrong place leads to more of them: a true replay has none or few, a wrong one soon has little else.

Of 17 public traces that were tried all 52,829 allocations landed; an 18th was lost at its event 179.
"""
FEWEST_ALLOCATIONS = 1


def reserved_over_time(recording: Recording, before: Before) -> Iterator[int]:
    """Bytes reserved before each event, and after the last, by the recording's own segments."""
    reserved = sum(segment["total_size"] for segment in before.segments)
    yield reserved
    for event in recording.events:
        if event.action in {"segment_alloc", "segment_map"}:
            reserved += event.size
        elif event.action in {"segment_free", "segment_unmap"}:
            reserved -= event.size
        yield reserved


def find_card(
    recording: Recording, before: Before, given: int | None
) -> tuple[int | None, CardSource | None]:
    """What PyTorch could get at most: at the last OOM of the trace, else as given.

    A request that failed although the driver had room for it met a limit of the process's own. It is between the most
    that was ever reserved and what the request would have made of it: what is given if it lies there, else the former.
    """
    found, most, highest = None, 0, 0
    for event, reserved in zip(
        recording.events, reserved_over_time(recording, before), strict=False
    ):
        most = max(most, reserved)
        if event.action == "oom" and event.device_free is not None:
            found, highest = reserved + event.device_free, 0
            if met_limit(event):
                found, highest = most, reserved + max(event.size, LARGE_BUFFER)
    if found is not None and not (given is not None and most <= given < highest):
        return found, "oom"
    return given, None if given is None else "given"


def met_limit(event: Event) -> bool:
    """Whether a request failed for which the driver had room."""
    return event.device_free is not None and event.device_free >= max(event.size, LARGE_BUFFER)


def judge(
    recording: Recording, before: Before, repetition: Repetition, other: Repetition, *, newer: bool
) -> Fidelity:
    """The fidelity of a repetition, with the rule that it used unless the `other` rule did as well."""
    recorded = max(reserved_over_time(recording, before))
    replayed = repetition.player.peak_reserved
    both = repetition.landed == other.landed and repetition.allocations == other.allocations
    fidelity = Fidelity(
        allocations=repetition.allocations,
        landed=repetition.landed,
        first_miss=repetition.first_miss,
        oldest_segment_first=None if both else newer,
        recorded_peak_reserved=recorded,
        replayed_peak_reserved=replayed,
    )
    return replace(fidelity, reason=_reason(fidelity))


def _reason(fidelity: Fidelity) -> str | None:
    if fidelity.allocations < FEWEST_ALLOCATIONS:
        return (
            "the trace holds no allocation. Record with torch.cuda.memory._record_memory_history()."
        )
    if fidelity.share < LEAST_SHARE:
        return (
            f"the replay under your own settings puts only {fidelity.share:.1%} of the allocations where PyTorch put "
            f"them, and lost its way at event {fidelity.first_miss:,}. Record from the start of the program, without "
            "skipping kinds of entries."
        )
    off = abs(fidelity.replayed_peak_reserved - fidelity.recorded_peak_reserved)
    if off > MARGIN * fidelity.recorded_peak_reserved:
        return (
            f"the replay under your own settings reserves {format_size(fidelity.replayed_peak_reserved)} at its peak, "
            f"but the recording {format_size(fidelity.recorded_peak_reserved)}. Record from the start of the program."
        )
    return None


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
    case: Case,
    repetition: Repetition,
    fidelity: Fidelity,
    card_bytes: int | None,
    source: CardSource | None,
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
    recording: Recording,
    before: Before,
    repetition: Repetition,
    card_bytes: int | None,
    source: CardSource | None,
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


Progress = Callable[[int, int], None]
"""Called with the events that were replayed so far, and those of all replays together."""


@dataclass(slots=True)
class Work:
    """Progress over replays of the same trace."""

    report: Progress
    events: int
    replays: int = 2
    done: int = 0

    def on_sample(self, number: int) -> None:
        """So many events of the replay at hand are done."""
        self.report(self.done * self.events + number, self.replays * self.events)

    def next(self) -> None:
        """The replay at hand is over."""
        self.done += 1


@dataclass(frozen=True, slots=True)
class Ground:
    """The settings of a recording, its case, and the card (bytes PyTorch can get) that replays are made on.

    `is_own`: whether that may be the card of the recording; one smaller than what was reserved is only one to try.
    """

    recorded: Candidate
    case: Case
    card: int | None
    source: CardSource | None
    is_own: bool


def survey(recording: Recording, card_bytes: int | None, total_bytes: int | None) -> Ground:
    """The ground of a recording for a card as `what_if` takes it; raises UsageError as it does."""
    recorded = recorded_settings(recording)
    before = rebuild(recording, recorded.config)
    card, source = find_card(recording, before, card_bytes)
    if source == "oom":  # what a memory fraction left is what the allocator could get
        recorded = replace(
            recorded, config=replace(recorded.config, per_process_memory_fraction=1.0)
        )
    is_own = card is not None and (
        source == "oom" or card >= max(reserved_over_time(recording, before))
    )
    case = Case(
        recording, recorded.config, before, *((card, total_bytes) if is_own else (None, None))
    )
    return Ground(recorded, case, card, source, is_own)


def repeat_best(case: Case, work: Work) -> tuple[Repetition, Fidelity, bool]:
    """The better repetition of the two rules for free blocks of equal size; whether it is that of PyTorch 2.13."""
    found: list[Repetition] = []
    for newer in (True, False):
        misses = found[0].allocations - found[0].landed if found else len(case.recording.events)
        found.append(
            repeat(case, oldest_segment_first=newer, most_misses=misses, on_sample=work.on_sample)
        )
        work.next()
    newer = found[0].landed >= found[1].landed
    best, other = found if newer else found[::-1]
    return best, judge(case.recording, case.before, best, other, newer=newer), newer
