"""How well a recording can be repeated: under which rule, on which card, and whether that is enough for a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchmem.core.sizes import LARGE_BUFFER, format_size
from torchmem.simulator.recording.trace import Event, Recording
from torchmem.simulator.whatif.rebuild import Before
from torchmem.simulator.whatif.repetition import Repetition
from torchmem.simulator.whatif.result import CardSource, Fidelity
from torchmem.simulator.whatif.verdict import MARGIN

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


def find_card(recording: Recording, before: Before, given: int | None) -> tuple[int | None, CardSource | None]:
    """What PyTorch could get at most: at the last OOM of the trace, else as given.

    A request that failed although the driver had room for it met a limit of the process's own. It is between the most
    that was ever reserved and what the request would have made of it: what is given if it lies there, else the former.
    """
    found, most, highest = None, 0, 0
    for event, reserved in zip(recording.events, reserved_over_time(recording, before), strict=False):
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


def judge(recording: Recording, before: Before, repetition: Repetition, other: Repetition, *, newer: bool) -> Fidelity:
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
        return "the trace holds no allocation. Record with torch.cuda.memory._record_memory_history()."
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
