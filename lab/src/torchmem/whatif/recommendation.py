"""Which setting to recommend.

Settings are compared by these criteria, in this order:

1. A request that fails.
2. Retries, each of which empties the cache and stalls the GPU.
3. The peak of reserved memory.
4. Driver calls that free memory, each of which waits for the GPU.

A difference counts only beyond a margin. If a setting does not win by one of the criteria, the
recorded settings stay; among equals, the simpler setting wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.whatif.result import Fidelity, Recommendation, ReplayResult

PEAK_MARGIN = 0.05
"""The smallest difference in peak memory that counts; the start of a replay may be as far off."""
RETRY_MARGIN = 0.1
"""The smallest difference in retries that counts."""
FREES_RATIO = 0.5
MIN_FEWER_FREES = 100
"""Driver calls that free memory count if there are at most half as many, and this many fewer."""


def no_recommendation(fidelity: Fidelity) -> Recommendation:
    """Return the decision if the replay does not reproduce the recording."""
    return Recommendation("none", f"No recommendation: {fidelity.reason}")


def decide(
    fidelity: Fidelity,
    baseline: ReplayResult,
    others: Sequence[ReplayResult],
) -> Recommendation:
    """Return the recommendation, without the command to type.

    Args:
        fidelity: of the replay under the recorded settings.
        baseline: the recorded settings from the same start as the others.
        others: the replays under other settings; refused ones are ignored.
    """
    if fidelity.reason is not None:
        return no_recommendation(fidelity)
    best = best_of(baseline, others)
    if best is baseline:
        return keep(baseline, others)
    sentence = f"Set {best.conf or 'the defaults'}: {_benefit(best, baseline)}"
    return Recommendation("change", sentence, best.name, None, tuple(_reasons(best, baseline)))


def best_of(baseline: ReplayResult, others: Iterable[ReplayResult]) -> ReplayResult:
    """Return the best replay; the first one of those that are equally good."""
    best = baseline
    for other in others:
        if other.refused is None and _is_better(other, best):
            best = other
    return best


def _is_better(replay: ReplayResult, other: ReplayResult) -> bool:
    """Return whether `replay` wins by a margin in the first criterion in which the two differ."""
    if (replay.oom is None) != (other.oom is None):
        return replay.oom is None
    if replay.oom is not None:
        return False
    if abs(replay.retries - other.retries) > RETRY_MARGIN * max(replay.retries, other.retries):
        return replay.retries < other.retries
    peaks = replay.peak_reserved, other.peak_reserved
    if abs(peaks[0] - peaks[1]) > PEAK_MARGIN * max(peaks):
        return peaks[0] < peaks[1]
    return (
        replay.device_frees < FREES_RATIO * other.device_frees
        and replay.device_frees + MIN_FEWER_FREES <= other.device_frees
    )


def keep(
    baseline: ReplayResult, others: Iterable[ReplayResult], tried: str = "", better: str = "is"
) -> Recommendation:
    """Return the decision to keep the settings.

    `tried` is how the others were tried, after a comma; `better` the verb of "better".
    """
    number = sum(other.refused is None for other in others)
    if baseline.oom is None:
        sentence = f"none of {number} others {better} better by a relevant margin."
        return Recommendation("keep", f"Keep your settings: {sentence}")
    return Recommendation(
        "keep",
        f"Keep your settings: each of {number} others{tried} also runs out of memory. Request less "
        "memory, for example with a smaller batch, or use a larger GPU.",
        reasons=(at_oom(baseline),),
    )


def at_oom(replay: ReplayResult) -> str:
    """Return the state of the memory at a replay's first OOM, as a sentence."""
    oom = replay.oom
    if oom is None:
        raise ValueError(f"{replay.name} did not run out of memory")
    return (
        f"At event {oom.event:,}, a request of {format_size(oom.requested)} fails with "
        f"{format_size(oom.allocated)} allocated, {format_size(oom.reserved)} reserved and "
        f"{format_size(oom.stranded)} stranded."
    )


def _benefit(best: ReplayResult, baseline: ReplayResult) -> str:
    if baseline.oom is not None:
        return "the requests that failed would have succeeded."
    if abs(baseline.retries - best.retries) > RETRY_MARGIN * baseline.retries:
        return f"{best.retries:,} retries instead of {baseline.retries:,}."
    if baseline.peak_reserved - best.peak_reserved > PEAK_MARGIN * baseline.peak_reserved:
        saved = 1 - best.peak_reserved / baseline.peak_reserved
        return f"peak memory is {saved:.0%} lower."
    return "less than half as many driver calls that free memory."


def _reasons(best: ReplayResult, baseline: ReplayResult) -> Iterator[str]:
    if baseline.oom is not None:
        yield f"With your settings: {at_oom(baseline)}"
    yield (
        f"Peak reserved {format_size(best.peak_reserved)} instead of "
        f"{format_size(baseline.peak_reserved)}, for a peak of "
        f"{format_size(best.peak_allocated)} allocated."
    )
    if best.retries or baseline.retries:
        yield f"Retries {best.retries:,} instead of {baseline.retries:,}."
    if best.device_frees or baseline.device_frees:
        frees = f"{best.device_frees:,} instead of {baseline.device_frees:,}"
        yield f"Driver calls that free memory: {frees}."
