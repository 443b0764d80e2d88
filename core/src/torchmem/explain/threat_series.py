"""What threatens a living rank first, as series: for the alerts, the dashboards and any query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.explain.threats import Threat, ThreatKind, first_advice, iter_threats
from torchmem.explain.thresholds import Limits
from torchmem.metrics import catalog
from torchmem.metrics.families import Labels, ProcessView, family, info
from torchmem.sample.remedy_words import REMEDY_WORDS, RemedyKind
from torchmem.sample.sample import LIVE_STATES, DeviceSample, Process, Sample

OTHER_KINDS: frozenset[ThreatKind] = frozenset({"retries", "host", "settings"})
"""What costs time, or concerns the host. It is said last, and has series of its own."""


@dataclass(frozen=True, slots=True)
class Judgment:
    """The first threat to the memory of a rank: its kind, its bytes, and the component that grows.

    `remedy` is the first advice. All but the kind are None where they are unknown.
    """

    kind: ThreatKind
    bytes: int | None = None
    component: str | None = None
    remedy: RemedyKind | None = None


def judgment(sample: Sample, device: DeviceSample, limits: Limits) -> Judgment | None:
    """Return what the page says first about the memory of a rank; None if nothing threatens it."""
    for threat in iter_threats(sample, device, limits):
        if threat.kind is not None and threat.kind not in OTHER_KINDS:
            first = first_advice(sample, device, threat)
            remedy = first.kind if first else None
            return Judgment(threat.kind, threat.bytes, _component(device, threat), remedy)
    return None


def _component(device: DeviceSample, threat: Threat) -> str | None:
    return device.growth.component if device.growth and threat.bytes_per_step else None


def threat_families(found: Sequence[tuple[Labels, Judgment]]) -> Iterator[Metric]:
    """Yield the families of the judgments of ranks, by their labels gpu to launch."""
    rows = [((*labels, judged.kind), judged) for labels, judged in found]
    yield family(catalog.THREAT, [(labels, judged.bytes) for labels, judged in rows])
    yield info(catalog.THREAT_INFO, [(labels, _facts(judged)) for labels, judged in rows])


def _facts(judged: Judgment) -> dict[str, str]:
    remedy = REMEDY_WORDS[judged.remedy] if judged.remedy else None
    known = {"component": judged.component, "remedy": remedy}
    return {name: text for name, text in known.items() if text}


def judged_families(
    views: Sequence[ProcessView], limits: Callable[[Process], Limits]
) -> Iterator[Metric]:
    """Yield the families of the processes that live, each judged by its `limits`."""
    found = [
        (labels, judgment(view.sample, device, limits(view.sample.process)))
        for view in views
        if view.state in LIVE_STATES
        for labels, device in view.devices()
    ]
    yield from threat_families([(labels, judged) for labels, judged in found if judged])
