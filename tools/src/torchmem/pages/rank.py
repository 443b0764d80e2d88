"""The state of a rank as a page in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import device_parts
from torchmem.explain.rank_report import ending, heading, next_request, rank_facts
from torchmem.explain.run_chart import run_chart
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import Limits
from torchmem.node import words
from torchmem.node.ranks import TrainingProcess
from torchmem.pages import memory_map, sections
from torchmem.pages.oom import advice_items
from torchmem.pages.page import Heading, filled
from torchmem.sample.memory_map import MAP_SUFFIX, DeviceMap, MemoryMap
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.sample import LIVE_STATES, DeviceSample, Sample, State, live_state

MAX_DEVICES = 16
"""More than a node has; a page with more would be too large."""


@dataclass(frozen=True, slots=True)
class ReportedProcess:
    """A process with its newest sample, at a time in Unix seconds.

    `gpus` are NVML's indices by UUID, where known; `known` is the number of devices, if some are
    left out of the sample.
    """

    process: TrainingProcess
    sample: Sample
    now: float
    gpus: Mapping[str, int]
    known: int = 0

    @property
    def state(self) -> State:
        """The state of the process."""
        return self.sample.ended or live_state(self.sample, self.now)

    @property
    def is_live(self) -> bool:
        """Whether it runs."""
        return self.state in LIVE_STATES

    def index(self, device: DeviceSample) -> int | None:
        """Return NVML's index of a device, None if it is unknown."""
        return self.gpus.get(device.uuid or "")

    def ago(self, timestamp: float | None) -> str:
        """Return how long ago a time was, as the end of a title; "" if it is unknown."""
        return "" if timestamp is None else f", {format_seconds(self.now - timestamp)} ago"


def page(subject: ReportedProcess, limits: Limits) -> bytes:
    """Return the page, judged by the thresholds in `limits`.

    It has the memory map that the process published last, if any, and at most MAX_DEVICES devices.
    """
    devices = subject.sample.devices
    shown = replace(
        subject, sample=replace(subject.sample, devices=devices[:MAX_DEVICES]), known=len(devices)
    )
    sample, process = shown.sample, shown.process
    found = memory_map.read(sibling_path(process.sample, MAP_SUFFIX), process.uid)
    top = Heading(
        title=f"Memory of {sample.process.run}, rank {sample.process.rank}",
        kind="out of memory" if shown.state == "oom" else shown.state,
        state=shown.state,
        headline=_headline(shown, limits),
        about=_about(shown),
    )
    text = words.rank_page(sample, shown.now, shown.gpus, limits)
    drawn = [_device(shown, device, limits, found) for device in sample.devices]
    return filled(top, text, drawn, [_map_of(found, device) for device in sample.devices])


def _about(subject: ReportedProcess) -> list[str]:
    """Return who this is; what the devices have in common is listed once."""
    sample, now = subject.sample, subject.now
    about = [heading(sample, device, now, subject.index(device)) for device in sample.devices]
    if subject.known > len(sample.devices):
        about.append((f"{len(sample.devices)} of {subject.known} devices are shown",))
    return list(dict.fromkeys(line for lines in about for line in lines))


def _headline(subject: ReportedProcess, limits: Limits) -> str:
    """Return how the rank ended, or while it runs, what threatens it most."""
    sample = subject.sample
    found = [threat.text for device in sample.devices for threat in threats(sample, device, limits)]
    ended = ending(sample, subject.state)
    return ended or next(iter(found), "Nothing threatens this rank at the moment.")


def _device(
    subject: ReportedProcess, device: DeviceSample, limits: Limits, maps: MemoryMap | None
) -> dict[str, Any]:
    sample = subject.sample
    chart = run_chart(device.run_history, device.total_bytes)
    parts = device_parts(device, device.driver_free_bytes)
    found = [asdict(threat) for threat in threats(sample, device, limits)]
    return {
        "name": gpu_name(device.index, device.uuid, subject.index(device)),
        "total": device.total_bytes,
        "chart": asdict(chart) if chart else None,
        "paragraphs": _next(device) if subject.is_live else [],
        "threats": found if subject.is_live else None,
        "advice": advice_items(advice(sample, device, limits)),
        "memory": f"Memory of the GPU{subject.ago(device.stats_timestamp)}",
        "parts": sections.parts(parts, sample.steps.unread),
        "facts": sections.facts(rank_facts(sample, device, subject.now)),
        "listings": [],
        "map": f"Memory map{subject.ago(maps.timestamp if maps else None)}",
    }


def _next(device: DeviceSample) -> list[dict[str, str]]:
    words = next_request(device.layout) if device.layout else None
    title = "Would the next large allocation succeed?"
    return [sections.paragraph(title, words)] if words else []


def _map_of(found: MemoryMap | None, device: DeviceSample) -> DeviceMap | None:
    devices = found.devices if found else ()
    same = (item for item in devices if (item.index, item.uuid) == (device.index, device.uuid))
    return next((item for item in same if item.segments), None)
