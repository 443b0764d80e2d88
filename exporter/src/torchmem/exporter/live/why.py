"""Explain the memory of one rank with the texts of `torchmem why` and `torchmem why`.

Every client that may read /metrics may read this, except for what tells about the program: lines,
tensors and the call stack. Other clients see only the line in `torchmem_last_oom_info`. The rest is
for the rank's own user, see `web/peer_user`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.explain.headline import headline
from torchmem.explain.offer import offer
from torchmem.explain.oom_chart import oom_charts
from torchmem.explain.oom_listings import Listing, listings, oom_lines, program_lines
from torchmem.explain.oom_report import (
    OomReport,
    decode,
    failure_reason,
    memory_parts,
    origin_lines,
    preceding_events,
)
from torchmem.explain.parts import PartBytes, component_words, part_words, plausible, rank_parts
from torchmem.explain.rank_report import (
    Fact,
    ending,
    memory_facts,
    next_request,
    rank_report,
    settings_facts,
)
from torchmem.explain.remedies import (
    REMEDY_BY_KILL,
    Remedy,
    gain_sentence,
    remedies,
    would_not_help,
)
from torchmem.explain.run_chart import Chart
from torchmem.exporter.live.state import Document, PartState, ThreatText, part_states, rank_threats
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.sample_files import Published
from torchmem.host.process_table import process_key
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import (
    MAX_REPORT_BYTES,
    MAX_USER_ENTRIES,
    REPORT_SUFFIX,
    SAMPLE_SUFFIX,
)
from torchmem.sample.sample import LIVE_STATES, DeviceSample
from torchmem.sample.untrusted import (
    UntrustedFileError,
    open_untrusted_directory,
    read_untrusted,
)

MAX_HOLDERS = 4


class FactText(Document, frozen=True, kw_only=True):
    """What is known about one subject, in a few words."""

    subject: str
    text: str


class RemedyText(Document, frozen=True, kw_only=True):
    """One thing to do, and lines to type."""

    text: str
    lines: tuple[str, ...] = ()


class LabeledBytes(Document, frozen=True, kw_only=True):
    """What some of a device's memory was used for, in bytes."""

    label: str
    bytes: int


class OomWhy(Document, frozen=True, kw_only=True):
    """An OOM report in the words of `torchmem why`. `time` is in Unix seconds.

    `about`: the process, its GPU and its versions. `parts`: the use of the device at that time; its
    sizes add up to `total_bytes`. `charts`: the whole run, and the minutes before. `listings`: the
    lines and tensors that held the memory and the call stack, if the client may see them, and what
    to record next time; `hidden`: whether some were left out. `note`: what would not help.
    """

    time: float
    summary: str
    about: tuple[str, ...]
    reason: str
    before: str
    parts: tuple[PartState, ...]
    advice: tuple[RemedyText, ...]
    facts: tuple[FactText, ...]
    charts: tuple[Chart, ...]
    listings: tuple[Listing, ...]
    total_bytes: int | None = None
    note: str | None = None
    hidden: bool | None = None


class RankWhy(Document, frozen=True, kw_only=True):
    """The answer about one rank on one device.

    `heading`: who it is, and `memory`: what the device was used for, as `torchmem why` prints
    them; `parts_at_peak`: what its tensors were at their peak, the largest first. `holds`: what
    holds its memory; `next_request`: whether the next allocation would succeed;
    `ending`: how it ended. `run`: its memory over the whole run, in at most 64 points. `oom`: its
    newest OOM report, if there is one.
    """

    id: str
    heading: tuple[str, ...] = ()
    memory: tuple[LabeledBytes, ...] = ()
    parts_at_peak: tuple[LabeledBytes, ...] = ()
    holds: str | None = None
    next_request: str | None = None
    ending: str | None = None
    threats: tuple[ThreatText, ...] = ()
    advice: tuple[RemedyText, ...] = ()
    facts: tuple[FactText, ...] = ()
    run: Chart | None = None
    oom: OomWhy | None = None


def rank_why(
    found: NodeReading, run_dir: Path, item: Published, device: DeviceSample, *, may_look: bool
) -> RankWhy:
    """Return the texts about a process on one of its devices.

    `may_look`: whether the client may see what tells about the program. Reads the OOM report in
    `run_dir`, if there is one.
    """
    sample, layout = item.sample, device.layout
    outside = found.outside.get((device.uuid or "", process_key(sample.process)))
    is_live = item.state in LIVE_STATES
    report = newest_report(run_dir, item) if device.last_oom else None
    limits, index = found.limits(item), _index(found, device)
    words = rank_report(sample, device, found.time, index, limits)
    return RankWhy(
        id=item.id,
        heading=words.heading,
        memory=_labeled(words.parts),
        parts_at_peak=_labeled(_at_peak(device)),
        holds=_holds(rank_parts(device, outside)),
        next_request=next_request(layout) if layout and is_live else None,
        ending=_ending(found, item),
        threats=rank_threats(sample, device, limits) if is_live else (),
        advice=tuple(map(_advice, words.advice)) if is_live else _after_kill(found, item),
        facts=_facts(words.facts),
        run=words.run,
        oom=oom_why(report, index, may_look=may_look) if report else None,
    )


def _labeled(parts: Iterable[tuple[str, int]]) -> tuple[LabeledBytes, ...]:
    known = [(label, size) for label, size in parts if plausible(size)]
    return tuple(LabeledBytes(label=label, bytes=size) for label, size in known)


def _holds(parts: Iterable[PartBytes]) -> str | None:
    largest = sorted(parts, key=lambda part: -part.bytes)[:MAX_HOLDERS]
    return ", ".join(f"{format_size(part.bytes)} {part_words(part)}" for part in largest) or None


def _at_peak(device: DeviceSample) -> list[tuple[str, int]]:
    largest = sorted(device.component_peaks.items(), key=lambda item: -item[1])
    return [(component_words(name), size) for name, size in largest if size]


def _ending(found: NodeReading, item: Published) -> str | None:
    text = ending(item.sample, item.state)
    cause = found.kill_causes.get(process_key(item.sample.process))
    if item.state == "killed" and cause == "host_memory":
        return f"{text} The kernel killed it because the memory of the host was full."
    return text


def _after_kill(found: NodeReading, item: Published) -> tuple[RemedyText, ...]:
    cause = found.kill_causes.get(process_key(item.sample.process))
    is_killed = item.state == "killed" and cause
    return (RemedyText(text=f"{REMEDY_BY_KILL[cause]}."),) if is_killed and cause else ()


def _advice(remedy: Remedy) -> RemedyText:
    return RemedyText(text=f"{remedy.text}{gain_sentence(remedy)}", lines=remedy.lines)


def _index(found: NodeReading, device: DeviceSample) -> int | None:
    gpu = found.gpus.get(device.uuid or "")
    return gpu.index if gpu else None


def oom_why(report: OomReport, gpu: int | None, *, may_look: bool) -> OomWhy:
    """Return the texts about an OOM report.

    `gpu`: NVML's index, None if it is unknown; `may_look`: with what tells about the program.
    """
    device = report.device
    return OomWhy(
        time=report.oom.timestamp,
        summary=headline(report),
        about=tuple(origin_lines(report, gpu)),
        reason=" ".join(failure_reason(report, gpu)),
        before=" ".join(preceding_events(report)),
        parts=part_states(part for part in memory_parts(report) if plausible(part.bytes)),
        advice=tuple(map(_advice, remedies(report))),
        facts=_facts((*memory_facts(device), *settings_facts(report.allocator_settings))),
        charts=oom_charts(report),
        listings=tuple(listings(oom_lines(report) if may_look else offer(report))),
        total_bytes=plausible(device.total_bytes),
        note=would_not_help(report) or None,
        hidden=True if not may_look and any(program_lines(report)) else None,
    )


def _facts(known: Iterable[Fact]) -> tuple[FactText, ...]:
    return tuple(FactText(subject=fact.subject, text=fact.text) for fact in known)


def newest_report(run_dir: Path, item: Published) -> OomReport | None:
    """Return the newest OOM report that the process wrote beside its sample file, if valid."""
    folder, _, sample = item.path.rpartition("/")
    stem = re.escape(sample.removesuffix(SAMPLE_SUFFIX))
    form = re.compile(rf"{stem}-(\d+){re.escape(REPORT_SUFFIX)}")
    with (
        contextlib.suppress(OSError, UntrustedFileError, UsageError),
        open_untrusted_directory(run_dir / folder, item.uid) as (descriptor, _),
    ):
        name = _newest(descriptor, form)
        if name is not None:
            data, _ = read_untrusted(name, MAX_REPORT_BYTES, item.uid, directory=descriptor)
            return decode(data)
    return None


def _newest(directory: int, form: re.Pattern[str]) -> str | None:
    """Return the name with the highest number."""
    with os.scandir(directory) as entries:
        matches = [form.fullmatch(entry.name) for entry in islice(entries, MAX_USER_ENTRIES)]
    numbers = {match[0]: int(match[1]) for match in matches if match}
    return max(numbers, key=lambda name: numbers[name], default=None)
