"""A rank's report as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchmem.cli.terminal import joined, wrapped
from torchmem.explain.rank_report import RankReport, rank_report
from torchmem.explain.thresholds import Limits
from torchmem.oom.text import advice_lines, fact_lines, memory_lines, run_lines
from torchmem.sample.sample import Sample

WIDTH = 80


def page(sample: Sample, now: float, gpus: Mapping[str, int], limits: Limits) -> str:
    """Return the report of a process: one part for each of its devices.

    `gpus` are NVML's indices by UUID, as far as they are known.
    """
    return "\n".join(
        joined(sections(rank_report(sample, device, now, gpus.get(device.uuid or ""), limits)))
        for device in sample.devices
    )


def sections(report: RankReport, width: int = WIDTH) -> list[list[str]]:
    """Return the sections of a report, in lines of at most `width` columns.

    Lines to type and the names and sizes of the memory's parts may be longer.
    """
    return [
        [*report.heading],
        [*memory_lines(report.total_bytes, report.parts, report.age_seconds, width)],
        [*fact_lines(report.facts, width)],
        [*run_lines(report.run)],
        [*_threats(report.threats, width)],
        [*advice_lines(report.advice, width)],
    ]


def _threats(threats: Sequence[str] | None, width: int) -> Iterator[str]:
    if threats is None:
        return
    yield "Threats"
    for threat in threats:
        yield from wrapped(threat, "  - ", width)
    if not threats:
        yield "  Nothing at the moment."
