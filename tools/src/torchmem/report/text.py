"""A rank's report as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torchmem.cli.terminal import joined, wrapped
from torchmem.explain.thresholds import Limits
from torchmem.node.state import RankWhy
from torchmem.node.why import rank_report
from torchmem.oom.text import advice_lines, fact_lines, memory_lines, run_lines
from torchmem.sample.sample import DeviceSample, Sample

WIDTH = 80


def page(sample: Sample, now: float, gpus: Mapping[str, int], limits: Limits) -> str:
    """Return the report of a process: one part for each of its devices.

    `gpus` are NVML's indices by UUID, as far as they are known.
    """
    return "\n".join(
        _device(sample, device, now, gpus.get(device.uuid or ""), limits)
        for device in sample.devices
    )


def _device(
    sample: Sample, device: DeviceSample, now: float, gpu: int | None, limits: Limits
) -> str:
    report, read = rank_report(sample, device, now, gpu, limits), device.stats_timestamp
    parts = [(part.label, part.bytes) for part in report.memory]
    age = None if read is None else max(0.0, now - read)
    return joined(sections(report, memory_lines(device.total_bytes, parts, age, WIDTH)))


def sections(report: RankWhy, memory: Iterable[str], width: int = WIDTH) -> list[list[str]]:
    """Return the sections of a report, in lines of at most `width` columns.

    `memory` has the lines about the device. Lines to type and the names and sizes of the memory's
    parts may be longer.
    """
    return [
        [*report.heading],
        [*memory],
        [*fact_lines(report.facts, width)],
        [*run_lines(report.run)],
        [*_threats(report, width)],
        [*advice_lines(report.advice, width)],
    ]


def _threats(report: RankWhy, width: int) -> Iterator[str]:
    """Yield what threatens a process that has not ended."""
    if report.ending:
        return
    yield "Threats"
    for threat in report.threats:
        yield from wrapped(threat.text, "  - ", width)
    if not report.threats:
        yield "  Nothing at the moment."
