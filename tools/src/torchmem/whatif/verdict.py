"""Which setting to recommend, by an order of preference that is written down here and nowhere else.

1. A request that fails outweighs everything. 2. Fewer retries, each of which empties the cache and stops the GPU.
3. A lower peak of reserved memory. 4. Fewer blocks of memory given back to the driver, each of which waits for the GPU.
Each counts only by a margin; what is even in all four stays as it is, and among equals the simpler setting comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.whatif.result import Fidelity, Recommendation, ReplayResult

MARGIN = 0.05
"""A difference in peak memory counts from this share on; so much may the start of the replay be off."""
FEWER_RETRIES = 0.1
"""A difference in retries counts from this share on."""
FEWER_FREES = 0.5
MANY_FREES = 100
"""A difference in calls that give memory back counts if it is half of them and this many."""


def is_better(one: ReplayResult, other: ReplayResult) -> bool:
    """Whether `one` is better than `other` by a margin in the first respect in which they differ."""
    if (one.oom is None) != (other.oom is None):
        return one.oom is None
    if one.oom is not None:
        return False
    if abs(one.retries - other.retries) > FEWER_RETRIES * max(one.retries, other.retries):
        return one.retries < other.retries
    if abs(one.peak_reserved - other.peak_reserved) > MARGIN * max(
        one.peak_reserved, other.peak_reserved
    ):
        return one.peak_reserved < other.peak_reserved
    return (
        one.device_frees < FEWER_FREES * other.device_frees
        and one.device_frees + MANY_FREES <= other.device_frees
    )


def decide(
    fidelity: Fidelity,
    recorded: ReplayResult,
    baseline: ReplayResult,
    others: Sequence[ReplayResult],
) -> Recommendation:
    """The verdict on the settings that were not refused.

    `baseline` is the recorded setting from the same start as the others; `recorded` is what was.
    """
    if fidelity.reason is not None:
        return Recommendation("none", f"No verdict: {fidelity.reason}")
    if recorded.oom is not None and baseline.oom is None:
        sentence = (
            "No verdict: with the same settings and the tensors that the trace began with in order, nothing fails, so "
            "what filled the memory came before the trace. Record from the start of the program."
        )
        return Recommendation("none", sentence)
    best = baseline
    for other in others:
        if other.refused is None and is_better(other, best):
            best = other
    if best is baseline:
        return _keep(baseline, others)
    return Recommendation(
        "change", _sentence(best, baseline), best.name, None, tuple(_reasons(best, baseline))
    )


def _keep(baseline: ReplayResult, others: Sequence[ReplayResult]) -> Recommendation:
    tried = [other for other in others if other.refused is None]
    if baseline.oom is None:
        sentence = (
            f"Keep your settings: none of {len(tried)} others is better by a margin that counts."
        )
        return Recommendation("keep", sentence)
    sentence = (
        f"Keep your settings: each of {len(tried)} others runs out of memory too. Less must be asked for, as with a "
        "smaller batch, or the card must be larger."
    )
    return Recommendation("keep", sentence, reasons=(_at_oom(baseline),))


def _at_oom(one: ReplayResult) -> str:
    oom = one.oom
    if oom is None:
        raise ValueError(f"{one.name} did not run out of memory")
    return (
        f"At event {oom.event:,} a request of {format_size(oom.requested)} fails with {format_size(oom.allocated)} "
        f"allocated, {format_size(oom.reserved)} reserved and {format_size(oom.stranded)} stranded."
    )


def _sentence(best: ReplayResult, baseline: ReplayResult) -> str:
    if baseline.oom is not None:
        return (
            f"Set {best.conf or 'the defaults'}: the requests that failed would have been served."
        )
    if (
        baseline.retries != best.retries
        and abs(baseline.retries - best.retries) > FEWER_RETRIES * baseline.retries
    ):
        return f"Set {best.conf or 'the defaults'}: {best.retries:,} retries instead of {baseline.retries:,}."
    if baseline.peak_reserved - best.peak_reserved > MARGIN * baseline.peak_reserved:
        saved = 1 - best.peak_reserved / baseline.peak_reserved
        return f"Set {best.conf or 'the defaults'}: it takes {saved:.0%} less memory at its peak."
    return f"Set {best.conf or 'the defaults'}: it gives memory back to the driver less than half as often."


def _reasons(best: ReplayResult, baseline: ReplayResult) -> list[str]:
    then, now = format_size(best.peak_reserved), format_size(baseline.peak_reserved)
    reasons = [] if baseline.oom is None else [f"With your settings: {_at_oom(baseline)}"]
    return [
        *reasons,
        f"Peak reserved {then} instead of {now}, for {format_size(best.peak_allocated)} allocated at most.",
        *_calls(best, baseline),
    ]


def _calls(best: ReplayResult, baseline: ReplayResult) -> Iterator[str]:
    if best.retries or baseline.retries:
        yield f"Retries {best.retries:,} instead of {baseline.retries:,}."
    if best.device_frees or baseline.device_frees:
        frees = f"{best.device_frees:,} instead of {baseline.device_frees:,}"
        yield f"Driver calls that give memory back: {frees}."
