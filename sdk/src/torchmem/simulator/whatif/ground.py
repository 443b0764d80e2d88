"""What all replays of one recording have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.whatif.case import Case
from torchmem.simulator.whatif.fidelity import find_card, judge, reserved_over_time
from torchmem.simulator.whatif.rebuild import rebuild
from torchmem.simulator.whatif.repetition import Repetition, repeat
from torchmem.simulator.whatif.result import CardSource, Fidelity
from torchmem.simulator.whatif.settings import Candidate, recorded_settings

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
        recorded = replace(recorded, config=replace(recorded.config, per_process_memory_fraction=1.0))
    is_own = card is not None and (source == "oom" or card >= max(reserved_over_time(recording, before)))
    case = Case(recording, recorded.config, before, *((card, total_bytes) if is_own else (None, None)))
    return Ground(recorded, case, card, source, is_own)


def repeat_best(case: Case, work: Work) -> tuple[Repetition, Fidelity, bool]:
    """The better repetition of the two rules for free blocks of equal size; whether it is that of PyTorch 2.13."""
    found: list[Repetition] = []
    for newer in (True, False):
        misses = found[0].allocations - found[0].landed if found else len(case.recording.events)
        found.append(repeat(case, oldest_segment_first=newer, most_misses=misses, on_sample=work.on_sample))
        work.next()
    newer = found[0].landed >= found[1].landed
    best, other = found if newer else found[::-1]
    return best, judge(case.recording, case.before, best, other, newer=newer), newer
