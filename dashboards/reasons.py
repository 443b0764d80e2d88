"""Why a rank runs out of memory: what it judges itself, or else what an alert knows.

The judgment is that of its page and of `torchmem why`. Alerts also know the past, other ranks and
NVML, but need some time.
"""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import recorded
from dashboards.queries import DEVICE_ROW, EXHAUSTION, newest, row, select

from torchmem.metrics import catalog
from torchmem.metrics.colors import CAUSES, STATES, TRENDS
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind

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

ALERTS: Mapping[str, tuple[str, RemedyKind] | None] = {
    "TorchmemOutOfMemory": None,
    "TorchmemFragmentationHigh": ("fragmentation", "expandable_segments"),
    "TorchmemStrandedAfterPhase": ("fragmentation", "expandable_segments"),
    "TorchmemMemoryLeak": ("leak", "find_kept"),
    "TorchmemNoMemoryForLibraries": ("library", "cache_for_libraries"),
    "TorchmemOutsideAllocatorGrowth": ("outside", "find_outside"),
    "TorchmemOutOfMemoryPredicted": ("leak", "find_kept"),
    "TorchmemPlannedBatchTooLarge": ("capacity", "bounded_step"),
    "TorchmemEngineCannotWake": ("external", "before_wake_up"),
    "TorchmemEngineSleepLeak": ("leak", "find_kept"),
    "TorchmemNearCapacity": ("capacity", "smaller_batch"),
    "TorchmemRetryStorm": ("capacity", "smaller_batch"),
}
"""What each alert says about the cause of the OOM that will come, and what helps.

They are in the order in which they count. An OOM that has come has labels for both.
"""

TOLD = ("threat", "remedy")
OF_OOM = ("cause", "remedy")
GROWING = 'threat=~"leak|kept|larger_step|outside"'


def judgments() -> str:
    """Return what threatens each living rank and the first advice, as labels threat and remedy.

    If nothing does now, it is what did most often in the 5 minutes of which the lowest headroom is
    shown.
    """
    devices = ", ".join(DEVICE_ROW)
    most = f"topk by ({devices}) (1, {row(DEVICE_ROW, select(recorded.THREAT_COUNT), *TOLD)})"
    return f"({row(DEVICE_ROW, select(catalog.THREAT_INFO), *TOLD)} or on ({devices}) {most})"


def alerts() -> str:
    """Return the alert of each rank, firing or pending, with the threat and the remedy it tells."""
    return " or on (run, launch, rank) ".join(_alert(*each) for each in ALERTS.items())


def _alert(name: str, told: tuple[str, RemedyKind] | None) -> str:
    found = newest(select(recorded.ALERTS, alertname=name))
    if told is None:
        devices, causes = ", ".join(DEVICE_ROW), row(DEVICE_ROW, found, "alertname", "cause")
        about = f"group_left (remedy) {row(DEVICE_ROW, select(catalog.LAST_OOM_INFO), *OF_OOM)}"
        ooms = f"{causes} * on ({devices}, cause) {about} or on ({devices}) {causes}"
        return f'label_replace({ooms}, "threat", "$1", "cause", "(.*)")'
    threat, remedy = told
    known = f'label_replace({row(DEVICE_ROW, found, "alertname")}, "threat", "{threat}", "", "")'
    return f'label_replace({known}, "remedy", "{REMEDY_WORDS[remedy]}", "", "")'


def reasons() -> str:
    """Return why each rank is threatened, or has run out of memory, with the first advice."""
    told = row(DEVICE_ROW, alerts(), *TOLD)
    return f"{judgments()} or on (run, launch, rank) {told}"


def seconds_left() -> str:
    """Return the time until memory runs out: as predicted, or at the pace of what grows."""
    judged = select(catalog.THREAT_INFO).replace("{", f"{{{GROWING}, ", 1)
    left = f"min without (kind) ({select(recorded.GROWTH_LEFT)})"
    return f"({EXHAUSTION} or {left} and on ({', '.join(DEVICE_ROW)}) {judged})"
