"""Write an OOM report as one HTML file that can be attached to a ticket."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_report import OomReport
from torchmem.explain.rank_report import Fact
from torchmem.node import words
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.state import OomWhy
from torchmem.pages import memory_map
from torchmem.pages.page import Heading, filled
from torchmem.pages.sections import advice, paragraph, parts
from torchmem.sample.memory_map import MAP_SUFFIX, DeviceMap
from torchmem.sample.run_directory import REPORT_SUFFIX


def page(path: Path, report: OomReport, why: OomWhy) -> bytes:
    """Return the page of a report with these words.

    It has the memory map at the OOM if the process left it beside the report.
    """
    process = report.process
    heading = Heading(
        title=f"Out of memory: {process.run}, rank {process.rank}",
        kind="Out of memory",
        state="oom",
        headline=f"{why.summary}.",
        about=words.heading_lines(why),
    )
    devices, maps = [_device(report, why)], [map_at(path, report)]
    return filled(heading, words.oom_page(why, str(path)), devices, maps)


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


def _device(report: OomReport, why: OomWhy) -> dict[str, Any]:
    device = report.device
    return {
        "name": gpu_name(device.index, device.uuid, gpu_indices().get(device.uuid or "")),
        "total": device.total_bytes,
        "chart": asdict(why.charts[0]) if why.charts else None,
        "paragraphs": [
            paragraph("Why the request failed", why.reason),
            paragraph("What happened before", why.before),
        ],
        "advice": advice(why.advice),
        "memory": "Memory of the GPU",
        "parts": parts(why.parts),
        "facts": [asdict(fact) for fact in (_time(report), *why.facts)],
        "listings": list(map(asdict, why.listings)),
        "map": "Memory map at the error",
    }


def _time(report: OomReport) -> Fact:
    """Return the time in UTC, because tickets are read elsewhere."""
    moment = time.gmtime(report.oom.timestamp)
    return Fact("time", time.strftime("%Y-%m-%d %H:%M:%S UTC", moment))
