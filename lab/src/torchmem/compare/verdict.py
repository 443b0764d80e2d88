"""Whether the memory of a run got worse: one verdict for each part, and one for all.

A peak that is known on both sides is compared, unless it is of a run that took no step, or of
another model of GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchmem.allocator.sizes import LARGE_BUFFER, format_size
from torchmem.compare.measured import Measured, Side
from torchmem.compare.peak_memory import PeakDiff, diff, exceeds
from torchmem.compare.preflight_documents import PHANTOM
from torchmem.sample.errors import UsageError

Outcome = Literal["regression", "improvement", "unchanged"]
ORDER: tuple[Outcome, ...] = ("regression", "improvement", "unchanged")


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part of both sides. sentence: why, without the outcome."""

    label: str
    before: Measured
    after: Measured
    outcome: Outcome
    sentence: str
    diff: PeakDiff

    @property
    def change(self) -> float | None:
        """By which share the peak that counts grew; None if it is unknown or was 0."""
        pair = _peaks(self.before, self.after)
        return (pair[1] - pair[0]) / pair[0] if pair and pair[0] else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All parts that both sides have, the worst first, and those that only one side has.

    differences: what should be the same and is not: name, before, after.
    """

    before: Side
    after: Side
    tolerance: float
    parts: tuple[PartResult, ...]
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of a part, but an improvement if no part is worse and one is better."""
        found = {part.outcome for part in self.parts}
        return next(outcome for outcome in ORDER if outcome in found)

    @property
    def differences(self) -> tuple[tuple[str, str, str], ...]:
        """What both sides know and what differs, such as the version of PyTorch."""
        before, after = self.before.facts, self.after.facts
        names = [name for name in before if name in after]
        return tuple(
            (name, before[name], after[name]) for name in names if before[name] != after[name]
        )

    @property
    def exit_code(self) -> int:
        """1 for a regression, else 0."""
        return int(self.outcome == "regression")


def compare(before: Side, after: Side, tolerance: float) -> Comparison:
    """Compare two sides. Raises UsageError if they cannot be compared."""
    if before.kind != after.kind:
        raise UsageError(
            f"{before.name} is {before.noun} and {after.name} is {after.noun}: compare two of one "
            "kind."
        )
    pairs = list(_pairs(before, after))
    if not pairs:
        raise UsageError(
            f"{before.name} and {after.name} have no part in common ({_some(before)}; "
            f"{_some(after)}): name two results of the same runs."
        )
    _check_gpus(before, after)
    for _, first, second in pairs:
        _check_steps(before, first, second)
        _check_steps(after, second, first)
    labels = {label for label, _, _ in pairs}
    parts = [_part(*pair, tolerance) for pair in pairs]
    parts.sort(key=_rank)
    is_one = len(before.parts) == len(after.parts) == 1
    return Comparison(
        before,
        after,
        tolerance,
        tuple(parts),
        () if is_one else tuple(label for label in before.parts if label not in labels),
        () if is_one else tuple(label for label in after.parts if label not in labels),
    )


def _check_gpus(before: Side, after: Side) -> None:
    """Refuse two models of GPU, of which one may have larger workspaces, or other kernels.

    A phantom GPU stands for any model.
    """
    gpus = before.facts.get("GPU", ""), after.facts.get("GPU", "")
    if all(gpus) and gpus[0] != gpus[1] and not any(gpu.endswith(PHANTOM) for gpu in gpus):
        raise UsageError(
            f"{before.name} is of {gpus[0]} and {after.name} of {gpus[1]}: compare two runs on one "
            "model of GPU."
        )


def _check_steps(side: Side, measured: Measured, other: Measured) -> None:
    """Refuse a run that ended before its first step, if the other one took steps."""
    is_started = measured.steps != 0 or measured.fits is False
    if not is_started and other.steps:
        raise UsageError(
            f"{side.name} is of a run that ended before its first step, so that its peak says "
            "little: name one that took steps."
        )


def _rank(part: PartResult) -> tuple[int, bool, float]:
    """Return a key that puts the worst part first: one that does not fit, then the largest peak."""
    fits_as_before = part.after.fits is not False or part.before.fits is False
    return ORDER.index(part.outcome), fits_as_before, -abs(part.change or 0)


def _pairs(before: Side, after: Side) -> Iterator[tuple[str, Measured, Measured]]:
    """Yield what is compared: parts of one label, or the only part of each."""
    if len(before.parts) == len(after.parts) == 1 and before.kind == "run":
        ((label, first),), (second,) = before.parts.items(), after.parts.values()
        yield label, first, second
        return
    for label, first in before.parts.items():
        if label in after.parts:
            yield label, first, after.parts[label]


def _some(side: Side) -> str:
    return ", ".join([*list(side.parts)[:3], *(["…"] if len(side.parts) > 3 else [])])


def _part(label: str, before: Measured, after: Measured, tolerance: float) -> PartResult:
    outcome, sentence = _judged(label, before, after, tolerance)
    return PartResult(label, before, after, outcome, sentence, diff(before.memory, after.memory))


def _judged(label: str, before: Measured, after: Measured, tolerance: float) -> tuple[Outcome, str]:
    peaks = _peaks(before, after)
    by_peak: Outcome = "unchanged"
    sentence = ""
    if peaks is not None:
        by_peak, sentence = _by_peak(before, after, tolerance)
    if before.fits and after.fits is False:
        then = "did not before" if after.ending == "oom" else "did before"
        return "regression", f"{_why_not(after, 'now')}, and {then}.{sentence}"
    if before.fits is False and after.fits is True and _reaches(before, after):
        now = "does not now" if before.ending == "oom" else "fits now"
        return "improvement", f"{_why_not(before, 'before')}, and {now}.{sentence}"
    if peaks is None:
        raise UsageError(f"the two have no known peak in common for {label}: name other files.")
    return by_peak, sentence.strip()


def _reaches(before: Measured, after: Measured) -> bool:
    """Return whether the second run went far enough that it would have run out as well."""
    return after.ending == "whole" or (after.steps or 0) > (before.steps or 0)


def _why_not(measured: Measured, when: Literal["before", "now"]) -> str:
    if measured.ending == "oom":
        return f"It {'ran' if when == 'before' else 'runs'} out of memory {when}"
    return f"It {'did' if when == 'before' else 'does'} not fit {when}"


def _by_peak(before: Measured, after: Measured, tolerance: float) -> tuple[Outcome, str]:
    first, second = _peaks(before, after) or (0, 0)
    kind = "allocated" if _allocated(before, after) else "reserved"
    sentence = f" Peak {kind} {_instead(first, second)}"
    if exceeds(first, second, tolerance):
        return "regression", f"{sentence}, more than the {percent(tolerance)} allowed."
    if second < first * (1 - tolerance):
        return "improvement", f"{sentence}."
    return _by_reserved(before, after, tolerance, sentence)


def _by_reserved(
    before: Measured, after: Measured, tolerance: float, sentence: str
) -> tuple[Outcome, str]:
    """Judge by reserved memory, which also has what fragmentation costs."""
    first, second = before.memory.peak_reserved, after.memory.peak_reserved
    if first is None or second is None or not _allocated(before, after):
        return "unchanged", f"{sentence}."
    is_more = exceeds(first, second, tolerance) and second - first > LARGE_BUFFER
    is_less = second < first * (1 - tolerance) and first - second > LARGE_BUFFER
    if is_more or is_less:
        more = f"{sentence}, but peak reserved {_instead(first, second)}: fragmentation"
        return ("regression" if is_more else "improvement"), f"{more}."
    return "unchanged", f"{sentence}."


def percent(share: float) -> str:
    """Return a share in percent: "2%" or "0.5%"."""
    return f"{100 * share:.4g}%"


def _instead(first: int, second: int) -> str:
    if first == second:
        return f"{format_size(second)} as before"
    share = f" ({(second - first) / first:+.1%})" if first else ""
    return f"{format_size(second)} instead of {format_size(first)}{share}"


def _peaks(before: Measured, after: Measured) -> tuple[int, int] | None:
    """Return the peaks that count: allocated bytes if both sides know them, else reserved ones."""
    return _allocated(before, after) or _both(
        before.memory.peak_reserved, after.memory.peak_reserved
    )


def _allocated(before: Measured, after: Measured) -> tuple[int, int] | None:
    return _both(before.memory.peak_allocated, after.memory.peak_allocated)


def _both(first: int | None, second: int | None) -> tuple[int, int] | None:
    return None if first is None or second is None else (first, second)
