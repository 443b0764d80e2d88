"""Explain the memory of one rank with the texts of `torchmem why`.

Every client that may read /metrics may read this, except for what tells about the program: lines,
tensors and the call stack. Other clients see only the line in `torchmem_last_oom_info`. The rest is
for the rank's own user, see `web/peer_user`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import OomReport, decode
from torchmem.explain.parts import PartBytes, part_words, rank_parts
from torchmem.explain.rank_report import ending, next_request
from torchmem.explain.remedy import Remedy
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.sample_files import Published
from torchmem.host.process_table import process_key
from torchmem.node.state import RankWhy
from torchmem.node.why import oom_why, rank_report
from torchmem.sample.errors import UsageError
from torchmem.sample.remedy_words import REMEDY_WORDS
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
    since = max(0, sample.steps.count - report.steps.count) if report else None
    words = rank_report(sample, device, found.time, index, limits)
    return replace(
        words,
        id=item.id,
        holds=_holds(rank_parts(device, outside)),
        next_request=next_request(layout) if layout and is_live else None,
        ending=_ending(found, item),
        threats=words.threats if is_live else (),
        advice=words.advice if is_live else _after_kill(found, item),
        oom=oom_why(report, index, may_look=may_look, steps_since=since) if report else None,
    )


def _holds(parts: Iterable[PartBytes]) -> str | None:
    largest = sorted(parts, key=lambda part: -part.bytes)[:MAX_HOLDERS]
    return ", ".join(f"{format_size(part.bytes)} {part_words(part)}" for part in largest) or None


def _ending(found: NodeReading, item: Published) -> str | None:
    text = ending(item.sample, item.state)
    cause = found.kill_causes.get(process_key(item.sample.process))
    if item.state == "killed" and cause == "host_memory":
        return f"{text} The kernel killed it because the memory of the host was full."
    return text


def _after_kill(found: NodeReading, item: Published) -> tuple[Remedy, ...]:
    cause = found.kill_causes.get(process_key(item.sample.process))
    is_killed = item.state == "killed" and cause
    return (Remedy(cause, f"{REMEDY_WORDS[cause]}."),) if is_killed and cause else ()


def _index(found: NodeReading, device: DeviceSample) -> int | None:
    gpu = found.gpus.get(device.uuid or "")
    return gpu.index if gpu else None


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
