"""Why a rank runs out of memory: what it judges itself, or else what an alert knows.

The judgment is that of its page and of `torchmem why`. Alerts also know the past, other ranks and
NVML, but need some time.
"""

from __future__ import annotations

from dashboards import recorded
from dashboards.queries import DEVICE_ROW, EXHAUSTION, newest, row, select

from torchmem.explain.remedies import REMEDY_BY_CAUSE, REMEDY_BY_TREND
from torchmem.metrics import catalog
from torchmem.metrics.colors import CAUSES, STATES, TRENDS

NAMES = {
    "failed": "just failed",
    "leak": "memory leak",
    "kept": "growing",
    "larger_step": "larger steps",
    "outside": "outside PyTorch",
    "fragmentation": "fragmented",
    "capacity": "GPU full",
    "limit": "memory limit",
    "external": "other processes",
    "pending": "waiting frees",
    "library": "libraries",
    "none": "–",
}
"""What threatens a rank, or the cause of its OOM, in two words."""
COLORS = {**CAUSES, **TRENDS, "failed": STATES["failed"]}
REMEDIES = {
    **REMEDY_BY_CAUSE,
    **REMEDY_BY_TREND,
    "kept": REMEDY_BY_TREND["leak"],
    "failed": "On the node, run torchmem why",
    "none": "–",
}

ALERTS = {
    "TorchmemOutOfMemory": None,
    "TorchmemFragmentationHigh": "fragmentation",
    "TorchmemStrandedAfterPhase": "fragmentation",
    "TorchmemMemoryLeak": "leak",
    "TorchmemNoMemoryForLibraries": "library",
    "TorchmemOutsideAllocatorGrowth": "outside",
    "TorchmemOutOfMemoryPredicted": "leak",
    "TorchmemPlannedBatchTooLarge": "capacity",
    "TorchmemEngineCannotWake": "external",
    "TorchmemEngineSleepLeak": "leak",
    "TorchmemNearCapacity": "capacity",
    "TorchmemRetryStorm": "capacity",
}
"""What each alert says about the cause of the OOM that will come, in the order in which they count.

The alert about an OOM that has come has a label for it.
"""

GROWING = 'threat=~"leak|kept|larger_step|outside"'


def judgments() -> str:
    """Return what threatens each living rank, as the label threat.

    If nothing does now, it is what did most often in the 5 minutes of which the lowest headroom is
    shown.
    """
    devices = ", ".join(DEVICE_ROW)
    most = f"topk by ({devices}) (1, {row(DEVICE_ROW, select(recorded.THREAT_COUNT), 'threat')})"
    return f"({row(DEVICE_ROW, select(catalog.THREAT_INFO), 'threat')} or on ({devices}) {most})"


def alerts() -> str:
    """Return the alert of each rank, firing or pending, and what it says threatens the rank."""
    return " or on (run, launch, rank) ".join(_alert(*each) for each in ALERTS.items())


def _alert(name: str, threat: str | None) -> str:
    found = newest(select(recorded.ALERTS, alertname=name))
    if threat is None:
        causes = row(DEVICE_ROW, found, "alertname", "cause")
        return f'label_replace({causes}, "threat", "$1", "cause", "(.*)")'
    return f'label_replace({row(DEVICE_ROW, found, "alertname")}, "threat", "{threat}", "", "")'


def reasons() -> str:
    """Return why each rank is threatened, or has run out of memory, as the label threat."""
    told = row(DEVICE_ROW, alerts(), "threat")
    return f"{judgments()} or on (run, launch, rank) {told}"


def seconds_left() -> str:
    """Return the time until memory runs out: as predicted, or at the pace of what grows."""
    judged = select(catalog.THREAT_INFO).replace("{", f"{{{GROWING}, ", 1)
    left = f"min without (kind) ({select(recorded.GROWTH_LEFT)})"
    return f"({EXHAUSTION} or {left} and on ({', '.join(DEVICE_ROW)}) {judged})"
