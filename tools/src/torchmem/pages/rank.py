"""The state of a rank as a page in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import device_parts
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.published import Published
from torchmem.node.state import RankWhy
from torchmem.pages import memory_map, sections
from torchmem.pages.page import Heading, filled
from torchmem.sample.memory_map import MAP_SUFFIX, DeviceMap, MemoryMap
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.sample import DeviceSample

MAX_DEVICES = 16
"""More than a node has; a page with more would be too large."""

DeviceWhy = tuple[DeviceSample, RankWhy, str]
"""A device of a process, and what is told about the process on it, also as text."""


def page(sample: Path, item: Published, now: float, told: Sequence[DeviceWhy]) -> bytes:
    """Return the page of a process.

    It has the memory map beside the file `sample`, if any, and at most MAX_DEVICES devices. `now`
    is in Unix seconds.
    """
    process = item.sample.process
    found = memory_map.read(sibling_path(sample, MAP_SUFFIX), item.uid)
    top = Heading(
        title=f"Memory of {process.run}, rank {process.rank}",
        kind="out of memory" if item.state == "oom" else item.state,
        state=item.state,
        headline=_headline([why for _, why, _ in told]),
        about=_about([why for _, why, _ in told]),
    )
    shown = told[:MAX_DEVICES]
    text = "\n".join(page for _, _, page in shown)
    drawn = [_device(item, device, why, now, found) for device, why, _ in shown]
    return filled(top, text, drawn, [_map_of(found, device) for device, _, _ in shown])


def _about(whys: Sequence[RankWhy]) -> list[str]:
    """Return who this is; what the devices have in common is listed once."""
    about = [line for why in whys[:MAX_DEVICES] for line in why.heading]
    if len(whys) > MAX_DEVICES:
        about.append(f"{MAX_DEVICES} of {len(whys)} devices are shown")
    return list(dict.fromkeys(about))


def _headline(whys: Sequence[RankWhy]) -> str:
    """Return how the rank ended, or while it runs, what threatens it most."""
    found = (threat.text for why in whys for threat in why.threats)
    ended = next((why.ending for why in whys if why.ending), None)
    return ended or next(found, "Nothing threatens this rank at the moment.")


def _device(
    item: Published, device: DeviceSample, why: RankWhy, now: float, maps: MemoryMap | None
) -> dict[str, Any]:
    parts = device_parts(device, device.driver_free_bytes)
    return {
        "name": gpu_name(device.index, device.uuid, gpu_indices().get(device.uuid or "")),
        "total": device.total_bytes,
        "chart": asdict(why.run) if why.run else None,
        "paragraphs": _next(why),
        "threats": None if why.ending else list(map(asdict, why.threats)),
        "advice": sections.advice(why.advice),
        "memory": f"Memory of the GPU{_ago(device.stats_timestamp, now)}",
        "parts": sections.parts(parts, item.sample.steps.unread),
        "facts": list(map(asdict, why.facts)),
        "listings": [],
        "map": f"Memory map{_ago(maps.timestamp if maps else None, now)}",
    }


def _ago(timestamp: float | None, now: float) -> str:
    """Return how long ago a time was, as the end of a title; "" if it is unknown."""
    return "" if timestamp is None else f", {format_seconds(now - timestamp)} ago"


def _next(why: RankWhy) -> list[dict[str, str]]:
    title = "Would the next large allocation succeed?"
    return [sections.paragraph(title, why.next_request)] if why.next_request else []


def _map_of(found: MemoryMap | None, device: DeviceSample) -> DeviceMap | None:
    devices = found.devices if found else ()
    same = (each for each in devices if (each.index, each.uuid) == (device.index, device.uuid))
    return next((each for each in same if each.segments), None)
