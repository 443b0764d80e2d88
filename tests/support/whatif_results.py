"""What-if answers made up for the tests of what is shown: one that says change, one that keeps, one without verdict."""

from __future__ import annotations

from dataclasses import replace
from math import sin
from typing import Any

from torchmem.allocator.sizes import GIB, MIB
from torchmem.whatif.result import (
    FailedRequest,
    Fidelity,
    Recommendation,
    ReplayResult,
    TimelinePoint,
    WhatIf,
)

EVENTS = 19_430


def timeline(reserved: int, waste: float) -> tuple[TimelinePoint, ...]:
    """Steps of a training job; `waste`: share of the free memory that is stranded."""
    moments, most = [], 0
    for number in range(120):
        allocated = int(2.2 * GIB + 2.0 * GIB * abs(sin(number / 6)))
        most = max(
            most, min(reserved, int(allocated * 1.05) + number * (reserved - 4 * GIB) // 120)
        )
        moments.append(
            TimelinePoint(number * EVENTS // 120, most, allocated, int((most - allocated) * waste))
        )
    return tuple(moments)


def _outcome(name: str, conf: str, reserved: int, waste: float, **more: Any) -> ReplayResult:
    found = timeline(reserved, waste)
    worst = max(found, key=lambda moment: moment.stranded)
    outcome = ReplayResult(
        name, conf, peak_reserved=reserved, peak_allocated=int(4.2 * GIB), worst_stranded=worst.stranded,
        worst_event=worst.event, replayed_events=EVENTS, device_allocs=reserved // (20 * MIB), device_frees=12, syncs=3,
        timeline=found,
    )  # fmt: skip
    return replace(outcome, **more)


CARD = 8 * GIB
RECORDED = _outcome("recorded", "", 7_900 * MIB, 0.8, retries=5, ooms=1, syncs=5)
_OOM = FailedRequest(14_000, 978 * MIB, 7_900 * MIB, 4 * GIB, 3 * GIB, "fragmentation", "stranded")

CHANGE = WhatIf(
    name="rank0.pickle",
    device=0,
    events=EVENTS,
    card_bytes=CARD,
    card_source="oom",
    fidelity=Fidelity(6_624, 6_624, None, True, 7_900 * MIB, 7_900 * MIB),
    outcomes=(
        replace(
            RECORDED, oom=_OOM, timeline=tuple(m for m in RECORDED.timeline if m.event <= 14_000)
        ),
        _outcome(
            "expandable segments", "expandable_segments:True", 4_480 * MIB, 0.3, start="packed"
        ),
        _outcome(
            "roundup 8", "roundup_power2_divisions:8", 6_100 * MIB, 0.5, start="packed", retries=1
        ),
        _outcome(
            "max split 128", "max_split_size_mb:128", 7_300 * MIB, 0.7, start="packed", retries=12
        ),
        ReplayResult(
            "large segments 40",
            "large_segment_size_mb:40",
            refused="It needs PyTorch 2.11 or newer.",
        ),
    ),
    verdict=Recommendation(
        "change",
        "Switch expandable segments on: the job then never needs more than 4.38 GiB.",
        "expandable segments",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        (
            "The peak of reserved memory falls from 7.71 GiB to 4.38 GiB.",
            "No retry and no OOM, instead of 5 and 1.",
        ),
    ),
    caveats=(
        "The recorded requests come in the recorded order: a program that reacts to its memory would do otherwise.",
    ),
)
KEEP = replace(
    CHANGE,
    card_bytes=None,
    card_source=None,
    outcomes=tuple(
        replace(outcome, oom=None, ooms=0, retries=0) if outcome.refused is None else outcome
        for outcome in CHANGE.outcomes
    ),
    verdict=Recommendation("keep", "Keep the settings: none of the others needs less memory."),
)
NONE = replace(
    CHANGE,
    fidelity=Fidelity(
        7_591, 179, 179, None, 7_900 * MIB, 5_000 * MIB,
        "only 2 % of the allocations get their recorded address",
    ),
    outcomes=CHANGE.outcomes[:1],
    verdict=Recommendation("none", "No verdict: the replay goes another way at event 179. Record from the first step on."),
)  # fmt: skip
