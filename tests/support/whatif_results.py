"""What-if answers for the tests of the output: one for each decision."""

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
    Restart,
    TimelinePoint,
    WhatIf,
)

EVENTS = 19_430
POINTS = 120
GPU_BYTES = 8 * GIB


def counts(replay: ReplayResult) -> dict[str, int]:
    """Return what a replay counted, by the names of what is known of a run."""
    names = ("peak_reserved", "peak_allocated", "retries", "ooms", "device_allocs", "device_frees")
    return {name: getattr(replay, name) for name in names}


def timeline(reserved: int, waste: float) -> tuple[TimelinePoint, ...]:
    """Return the timeline of a training job; `waste` is the stranded share of the free memory."""
    points, peak = [], 0
    for number in range(POINTS):
        allocated = int(2.2 * GIB + 2.0 * GIB * abs(sin(number / 6)))
        growth = number * (reserved - 4 * GIB) // POINTS
        peak = max(peak, min(reserved, int(allocated * 1.05) + growth))
        stranded = int((peak - allocated) * waste)
        points.append(TimelinePoint(number * EVENTS // POINTS, peak, allocated, stranded))
    return tuple(points)


def _replay(name: str, conf: str, reserved: int, waste: float, **more: Any) -> ReplayResult:
    points = timeline(reserved, waste)
    worst = max(points, key=lambda point: point.stranded)
    result = ReplayResult(
        name,
        conf,
        peak_reserved=reserved,
        peak_allocated=int(4.2 * GIB),
        worst_stranded=worst.stranded,
        worst_event=worst.event,
        replayed_events=EVENTS,
        device_allocs=reserved // (20 * MIB),
        device_frees=12,
        syncs=3,
        timeline=points,
    )
    return replace(result, **more)


RECORDED = _replay("recorded", "", 7_900 * MIB, 0.8, retries=5, ooms=1, syncs=5)
OOM = FailedRequest(14_000, 978 * MIB, 7_900 * MIB, 4 * GIB, 3 * GIB, "fragmentation", "stranded")
UNTIL_OOM = tuple(point for point in RECORDED.timeline if point.event <= OOM.event)
EXPANDABLE, ROUNDED = "expandable_segments:True", "roundup_power2_divisions:8"

CHANGE = WhatIf(
    name="rank0.pickle",
    device=0,
    events=EVENTS,
    gpu_bytes=GPU_BYTES,
    gpu_source="oom",
    fidelity=Fidelity(6_624, 6_624, None, "segment", 7_900 * MIB, 7_900 * MIB),
    outcomes=(
        replace(RECORDED, oom=OOM, timeline=UNTIL_OOM),
        _replay("expandable segments", EXPANDABLE, 4_480 * MIB, 0.3, start="empty"),
        _replay("roundup 8", ROUNDED, 6_100 * MIB, 0.5, start="empty", retries=1),
        _replay("max split 128", "max_split_size_mb:128", 7_300 * MIB, 0.7, retries=12),
        ReplayResult(
            "large segments 40",
            "large_segment_size_mb:40",
            refused="It needs PyTorch 2.11 or newer.",
        ),
    ),
    verdict=Recommendation(
        "change",
        "Set expandable_segments:True: the requests that failed would have succeeded.",
        "expandable segments",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        (
            "Peak reserved 4.38 GiB instead of 7.71 GiB, for a peak of 4.20 GiB allocated.",
            "Retries 0 instead of 5.",
        ),
    ),
    caveats=("The driver is assumed to return exactly the memory that it is asked for.",),
)
KEEP = replace(
    CHANGE,
    gpu_bytes=None,
    gpu_source=None,
    outcomes=tuple(
        replace(result, oom=None, ooms=0, retries=0) if result.refused is None else result
        for result in CHANGE.outcomes
    ),
    verdict=Recommendation("keep", "Keep your settings: none of 3 others is better."),
)
NONE = replace(
    CHANGE,
    fidelity=Fidelity(
        7_591, 179, 179, None, 7_900 * MIB, 5_000 * MIB, "the replay differs from the recording"
    ),
    outcomes=CHANGE.outcomes[:1],
    verdict=Recommendation("none", "No recommendation: the replay differs from the recording."),
)
MID_RUN = replace(
    CHANGE,
    gpu_source="capture",
    outcomes=(
        replace(RECORDED, ooms=0),
        _replay("expandable segments", EXPANDABLE, 7_800 * MIB, 0.7, start="switched", retries=5),
        ReplayResult("split up to 64 MiB", "max_split_size_mb:64", "It cannot be switched."),
        ReplayResult("split up to 128 MiB", "max_split_size_mb:128", "It cannot be switched."),
    ),
    restarts=(
        Restart("expandable segments", EXPANDABLE, 4_480 * MIB),
        Restart("split up to 64 MiB", "max_split_size_mb:64", direction="more"),
        Restart("split up to 128 MiB", "max_split_size_mb:128", direction="same"),
        Restart("roundup 8", ROUNDED, direction="less"),
    ),
    verdict=Recommendation(
        "change",
        "Set expandable_segments:True and restart: peak memory is estimated to be 43% lower.",
        "expandable segments",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
)
