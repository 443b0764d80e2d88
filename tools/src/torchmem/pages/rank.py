"""The state of a rank as a page in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import device_parts
from torchmem.explain.rank_report import ending, next_request
from torchmem.explain.thresholds import Limits
from torchmem.node import words
from torchmem.node.ranks import TrainingProcess
from torchmem.node.state import RankWhy
from torchmem.node.why import rank_report, with_replay
from torchmem.pages import memory_map, sections
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


def page(subject: ReportedProcess, limits: Limits, replays: Mapping[int, str] = {}) -> bytes:
    """Return the page, judged by the thresholds in `limits`; `replays` as in `words.rank_page`.

    It has the memory map that the process published last, if any, and at most MAX_DEVICES devices.
    """
    devices = subject.sample.devices
    shown = replace(
        subject, sample=replace(subject.sample, devices=devices[:MAX_DEVICES]), known=len(devices)
    )
    sample, process = shown.sample, shown.process
    whys = [
        with_replay(
            rank_report(sample, device, shown.now, shown.index(device), limits),
            replays.get(device.index),
        )
        for device in sample.devices
    ]
    found = memory_map.read(sibling_path(process.sample, MAP_SUFFIX), process.uid)
    top = Heading(
        title=f"Memory of {sample.process.run}, rank {sample.process.rank}",
        kind="out of memory" if shown.state == "oom" else shown.state,
        state=shown.state,
        headline=_headline(shown, whys),
        about=_about(shown, whys),
    )
    text = words.rank_page(sample, shown.now, shown.gpus, limits, replays)
    drawn = [_device(shown, *each, found) for each in zip(sample.devices, whys, strict=True)]
    return filled(top, text, drawn, [_map_of(found, device) for device in sample.devices])


def _about(subject: ReportedProcess, whys: Sequence[RankWhy]) -> list[str]:
    """Return who this is; what the devices have in common is listed once."""
    about = [line for why in whys for line in why.heading]
    if subject.known > len(whys):
        about.append(f"{len(whys)} of {subject.known} devices are shown")
    return list(dict.fromkeys(about))


def _headline(subject: ReportedProcess, whys: Sequence[RankWhy]) -> str:
    """Return how the rank ended, or while it runs, what threatens it most."""
    found = (threat.text for why in whys for threat in why.threats)
    ended = ending(subject.sample, subject.state)
    return ended or next(found, "Nothing threatens this rank at the moment.")


def _device(
    subject: ReportedProcess, device: DeviceSample, why: RankWhy, maps: MemoryMap | None
) -> dict[str, Any]:
    parts = device_parts(device, device.driver_free_bytes)
    return {
        "name": gpu_name(device.index, device.uuid, subject.index(device)),
        "total": device.total_bytes,
        "chart": asdict(why.run) if why.run else None,
        "paragraphs": _next(device) if subject.is_live else [],
        "threats": list(map(asdict, why.threats)) if subject.is_live else None,
        "advice": sections.advice(why.advice),
        "memory": f"Memory of the GPU{subject.ago(device.stats_timestamp)}",
        "parts": sections.parts(parts, subject.sample.steps.unread),
        "facts": list(map(asdict, why.facts)),
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
