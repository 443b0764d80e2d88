"""Why a rank runs out of memory: what it judges itself, or else what an alert knows.

The judgment is that of its page and of `torchmem why`. Alerts also know the past, other ranks and
NVML, but need some time.
"""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import recorded
from dashboards.queries import (
    DEVICE_ROW,
    EXHAUSTION,
    append_matcher,
    newest,
    row,
    select,
)

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

_OOM = "TorchmemOutOfMemory"
ALERTS: Mapping[str, tuple[str, RemedyKind] | None] = {
    _OOM: None,
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
    now = row(DEVICE_ROW, select(catalog.THREAT_INFO), *TOLD)
    # The product removes series that have just ended, which `or` would keep in VictoriaMetrics.
    return f"(1 * {now} or on ({devices}) {most})"


def alerts() -> str:
    """Return the alert of each rank, firing or pending, with the threat and the remedy it tells."""
    of_oom = newest(select(recorded.ALERTS, alertname=_OOM))
    devices = ", ".join(DEVICE_ROW)
    about = f"group_left (remedy) {row(DEVICE_ROW, select(catalog.LAST_OOM_INFO), *OF_OOM)}"
    causes = row(DEVICE_ROW, of_oom, "alertname", "cause")
    ooms = f"{causes} * on ({devices}, cause) {about} or on ({devices}) {causes}"
    told = f"({select(recorded.ALERTS)} * on (alertname) group_left (threat, remedy) ({_told()}))"
    first = f"topk by ({devices}) (1, {row(DEVICE_ROW, newest(told), 'alertname', *TOLD)})"
    return (
        f'label_replace({ooms}, "threat", "$1", "cause", "(.*)") or on (run, launch, rank) {first}'
    )


def _told() -> str:
    """Return what each other alert tells, as labels; the first that counts has the highest value.

    One expression for all, because VictoriaMetrics refuses queries of more than 16 KiB.
    """
    known = [(alert, *about) for alert, about in ALERTS.items() if about]
    rows = []
    for value, (alert, threat, remedy) in zip(range(len(known), 0, -1), known, strict=True):
        labels = {"alertname": alert, "threat": threat, "remedy": REMEDY_WORDS[remedy]}
        text = f"vector({value})"
        for label, content in labels.items():
            text = f'label_replace({text}, "{label}", "{content}", "", "")'
        rows.append(text)
    return " or ".join(rows)


def reasons() -> str:
    """Return why each rank is threatened, or has run out of memory, with the first advice."""
    told = row(DEVICE_ROW, alerts(), *TOLD)
    return f"{judgments()} or on (run, launch, rank) {told}"


def threatened() -> str:
    """Return the devices of ranks that have a reason."""
    matcher = f'alertname=~"{"|".join(ALERTS)}"'
    alerting = newest(append_matcher(select(recorded.ALERTS), matcher))
    return row(DEVICE_ROW, f"{judgments()} or on (run, launch, rank) {alerting}")


def seconds_left() -> str:
    """Return the time until memory runs out: as predicted, or at the pace of what grows."""
    judged = select(catalog.THREAT_INFO).replace("{", f"{{{GROWING}, ", 1)
    left = f"min without (kind) ({select(recorded.GROWTH_LEFT)})"
    return f"({EXHAUSTION} or {left} and on ({', '.join(DEVICE_ROW)}) {judged})"
