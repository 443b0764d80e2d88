"""What `torchmem why` says of a report or a sample that is in no run directory."""

from __future__ import annotations

from pathlib import Path

from torchmem.explain.oom_report import OomReport
from torchmem.node.node_state import NvmlValues, node_state
from torchmem.node.published import NodeRanks, Published
from torchmem.node.state import RankWhy
from torchmem.node.summaries import steps_since
from torchmem.node.why import oom_why, rank_why
from torchmem.node.words import oom_page
from torchmem.pages import oom, rank
from torchmem.sample.sample import Sample, live_state
from torchmem.why.node_words import report_page
from torchmem.why.source import FoundRank, ranks_on_gpus


def oom_text(report: OomReport, path: Path | None = None) -> str:
    """Return the text about a report; with a file beside which samples and summaries may lie."""
    since = steps_since(path, report) if path else None
    why = oom_why(report, None, may_look=True, steps_since=since)
    return oom_page(why, str(path) if path else None)


def oom_html(path: Path, report: OomReport) -> bytes:
    """Return the page of a report in a file."""
    since = steps_since(path, report)
    return oom.page(path, report, oom_why(report, None, may_look=True, steps_since=since))


def rank_text(sample: Sample, now: float) -> str:
    """Return the text about the process of a sample."""
    return "\n".join(_shown(sample, now)[2])


def rank_html(sample: Sample, now: float) -> bytes:
    """Return the page of the process of a sample."""
    item, whys, pages = _shown(sample, now)
    told = list(zip(sample.devices[: len(whys)], whys, pages, strict=True))
    return rank.page(Path("/nowhere/0/sample"), item, now, told)


def _shown(sample: Sample, now: float) -> tuple[Published, list[RankWhy], list[str]]:
    item = Published(sample, 1, sample.ended or live_state(sample, now), attributed=True)
    found = NodeRanks(now, [item])
    devices = {device.uuid or "": device for device in sample.devices}
    shown: list[FoundRank] = ranks_on_gpus(node_state(found, NvmlValues()))
    whys = [rank_why(found, item, devices[each.gpu.uuid], may_look=True) for each in shown]
    return item, whys, [report_page(*each) for each in zip(shown, whys, strict=True)]
