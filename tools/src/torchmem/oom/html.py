"""Write an OOM report as one HTML file that can be attached to a ticket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_report import (
    OomReport,
    failure_reason,
    memory_uses,
    preceding_events,
)
from torchmem.explain.rank_report import Fact, memory_facts, settings_facts
from torchmem.explain.remedies import Remedy, gain_sentence, remedies, would_not_help
from torchmem.explain.run_chart import Chart, ChartLine, lines
from torchmem.oom import text
from torchmem.oom.lines import held_lines
from torchmem.oom.offer import offer
from torchmem.oom.recorded import leak_lines, sentence
from torchmem.oom.tensors import tensor_lines
from torchmem.oom.where import where
from torchmem.pages import memory_map
from torchmem.pages.page import Heading, filled
from torchmem.pages.sections import facts, listings, paragraph, parts
from torchmem.sample.memory_map import MAP_SUFFIX, DeviceMap
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.snapshot.leaks import Leak

_COLORS = {"allocated": "in_use", "reserved": "--soft", "stranded": "stranded", "headroom": "--ink"}
"""Names of the columns of the trend."""


def page(
    path: Path, report: OomReport, gpus: Mapping[str, int], leaking: Sequence[Leak] = ()
) -> bytes:
    """Return the page.

    `gpus` are NVML's indices by UUID, where known; `leaking` the lines that leak according to a
    recording. The page has the memory map at the OOM if the process left it beside the report.
    """
    gpu, process = gpus.get(report.device.uuid or ""), report.process
    words = f"{sentence(report, leaking)}."
    heading = Heading(
        title=f"Out of memory: {process.run}, rank {process.rank}",
        kind="Out of memory",
        state="oom",
        headline=words,
        about=text.heading_lines(report, gpu),
    )
    devices, maps = [_device(report, gpu, leaking)], [map_at(path, report)]
    return filled(heading, text.page(path, report, gpus, leaking), devices, maps)


def map_at(path: Path, report: OomReport) -> DeviceMap | None:
    """Return the map of the same moment beside a report; None without one.

    A later map of the process has the layout of another snapshot.
    """
    stem = path.name.removesuffix(REPORT_SUFFIX).rpartition("-")[0]
    if report.layout is None or not stem:
        return None
    found = memory_map.read(path.with_name(f"{stem}{MAP_SUFFIX}"))
    for device in found.devices if found else ():
        is_same = (device.index, device.uuid) == (report.device.index, report.device.uuid)
        if is_same and device.layout.timestamp == report.layout.timestamp and device.segments:
            return device
    return None


def _device(report: OomReport, gpu: int | None, leaking: Sequence[Leak]) -> dict[str, Any]:
    device, chart = report.device, _chart(report)
    return {
        "name": gpu_name(device.index, device.uuid, gpu),
        "total": device.total_bytes,
        "chart": asdict(chart) if chart else None,
        "paragraphs": [
            paragraph("Why the request failed", *failure_reason(report, gpu)),
            paragraph("What happened before", *preceding_events(report)),
        ],
        "advice": advice_items(remedies(report)),
        "note": would_not_help(report),
        "memory": "Memory of the GPU",
        "parts": parts(memory_uses(report)),
        "facts": facts(_facts(report)),
        "listings": listings(
            chain(
                leak_lines(leaking),
                held_lines(report),
                tensor_lines(report),
                where(report),
                offer(report),
            )
        ),
        "map": "Memory map at the error",
    }


def _facts(report: OomReport) -> Iterator[Fact]:
    """Yield the time in UTC, because tickets are read elsewhere, and the facts about the memory."""
    moment = time.gmtime(report.oom.timestamp)
    yield Fact("time", time.strftime("%Y-%m-%d %H:%M:%S UTC", moment))
    yield from memory_facts(report.device)
    yield from settings_facts(report.allocator_settings)


def advice_items(found: Sequence[Remedy]) -> list[dict[str, Any]]:
    """Return what to do, with the lines to type."""
    return [
        {"text": f"{remedy.text}{gain_sentence(remedy)}", "lines": list(remedy.lines)}
        for remedy in found
    ]


def _chart(report: OomReport) -> Chart | None:
    """Return the chart of the whole run; without a history, of the minutes before."""
    return text.whole_run(report) or _minutes_before(report)


def _minutes_before(report: OomReport) -> Chart | None:
    seconds = report.trend.seconds
    if not seconds or list(seconds) != sorted(seconds, reverse=True) or seconds[-1] < 0:
        return None
    columns = [
        ChartLine(name, _COLORS[name], column, fill=name == "allocated", dash=name == "headroom")
        for name, column in text.trend_columns(report)
    ]
    x = [*(-value for value in seconds), 0.0]
    total = report.device.total_bytes
    return Chart("The minutes before", "before", x, lines(columns), total, oom=True)
