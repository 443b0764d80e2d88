"""Whether the memory that is left at the end of a step grows from step to step.

Whether it fits, in one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import StatisticsError, correlation, linear_regression

from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.sizes import format_size
from torchmem.phantom.cards import Card
from torchmem.preflight.outcome import DeviceMemory, Outcome, StepMemory

LEAST_STEPS = 4
STEADY = 0.9
"""Correlation of memory and step from which on it grows: a single jump has 0.87 at most, sizes that vary have less."""


def growth(steps: Sequence[StepMemory]) -> int | None:
    """Bytes per step over the second half of the run; 0 when it does not grow, None when there are too few steps.

    The first half is left out because that is when gradients and the optimizer's state are made.
    """
    second = [step.allocated for step in steps[len(steps) // 2 :]]
    if len(second) < LEAST_STEPS:
        return None
    numbers = list(range(len(second)))
    try:
        if correlation(numbers, second) < STEADY:
            return 0
    except StatisticsError:  # all the same
        return 0
    if sum(later < earlier for earlier, later in pairwise(second)) > len(second) // 4:
        return 0
    return max(0, round(linear_regression(numbers, second).slope))


@dataclass(frozen=True, slots=True)
class Verdict:
    """fits: whether every request was served. sentence: for people."""

    fits: bool
    sentence: str


def verdict(
    card: Card, outcome: Outcome, report: OomReport | None, need: Outcome | None
) -> Verdict:
    """The verdict on a run that can have one.

    report: of the OutOfMemoryError that ended it. need: of the same command on a much larger card; None if there was no
    reason to try that.
    """
    if outcome.ended == "oom":
        return Verdict(
            False, f"Does not fit a {phantom(card)}: {_asked(outcome, report)}{_needs(card, need)}."
        )
    device = tightest(outcome)
    used, share = device.total - device.headroom, device.headroom / device.total
    where = f" on GPU {device.device}, the fullest" if len(outcome.devices) > 1 else ""
    takes = (
        f"it takes {format_size(used)} of {format_size(device.total)}{where}, CUDA context included"
    )
    leaves = f", and leaves {format_size(device.headroom)} ({share:.0%})"
    start = f"{'Fits' if not _trouble(device) else 'Fits, but only just,'} a {phantom(card)}: "
    return Verdict(True, f"{start}{takes}{leaves}{_trouble(device)}.")


def tightest(outcome: Outcome) -> DeviceMemory:
    """The card with the least to spare."""
    return min(outcome.devices, key=lambda device: device.headroom)


def phantom(card: Card) -> str:
    """The card in words, never without this one."""
    return f"phantom {card.product}"


def requested(outcome: Outcome, report: OomReport | None) -> int | None:
    """Bytes of the request that failed; None when nobody knows."""
    if report is not None:
        return report.oom.requested_bytes
    found = re.search(
        r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", outcome.error_message or ""
    )
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(found[1]) * units[found[2]]) if found else None


def _asked(outcome: Outcome, report: OomReport | None) -> str:
    size = requested(outcome, report)
    what = "a request" if size is None else f"a request of {format_size(size)}"
    when = f"in step {outcome.steps + 1:,}" if outcome.steps else "before the end of its first step"
    words = f"{when} {what} failed"
    if not outcome.devices:
        return words
    device = tightest(outcome)
    obtainable = format_size(device.total - device.outside)
    if (
        report is not None
        and report.reserved_bytes is not None
        and report.device.allocator is not None
    ):
        allocated = format_size(report.device.allocator.allocated_bytes.total)
        return f"{words} with {allocated} in tensors, of the {obtainable} that PyTorch can get"
    return f"{words} after {format_size(device.peak_allocated)} in tensors, of the {obtainable} that PyTorch can get"


def _needs(card: Card, need: Outcome | None) -> str:
    if need is None or not need.devices:
        return ""
    device = tightest(need)
    if need.ended == "oom":
        return f"; it does not fit {format_size(device.total)} either"
    peak = format_size(device.peak_reserved + device.outside)
    return f"; without such a limit it takes {peak}, where this card has {format_size(card.memory_bytes)}"


def _trouble(device: DeviceMemory) -> str:
    """What went wrong without ending the run."""
    words = []
    if device.retries:
        times = f"{device.retries:,} time{'s' * (device.retries != 1)}"
        words.append(
            f"PyTorch had to empty its cache {times} to find room (a retry, which stalls the GPU)"
        )
    if device.ooms:
        many = f"{device.ooms:,} requests" if device.ooms > 1 else "1 request"
        words.append(f"{many} failed with an OutOfMemoryError that the script caught")
    return "".join(f"; {word}" for word in words)
