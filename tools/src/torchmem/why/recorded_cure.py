"""What a replay of a living rank's own recording shows about the setting that it is advised.

The recording is the one that it left at an OutOfMemoryError that it survived, or a capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchmem.allocator.settings import (
    LAST_PARSED,
    REQUEST_SETTINGS,
    format_alloc_conf,
    parse_alloc_conf,
)
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.remedy import Remedy
from torchmem.explain.threat_series import judgment
from torchmem.explain.threats import advice
from torchmem.explain.thresholds import Limits
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.sample.errors import TorchmemError
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.sample import DeviceSample, Sample

MAX_BYTES = 64 << 20
MAX_EVENTS = 300_000
"""Longer recordings would take more than a few seconds: `torchmem whatif` replays them."""


def recorded_cure(sample: Sample, device: DeviceSample, limits: Limits, file: Path) -> str | None:
    """Return in one sentence what a replay shows about the setting that is advised first.

    `file` is the rank's sample. None if fragmentation is not what threatens the rank first, and
    without a recording that can be replayed.
    """
    judged = judgment(sample, device, limits)
    if judged is None or judged.kind != "fragmentation":
        return None
    first = advice(sample, device, limits)[0]
    if first.setting is None:
        return None
    conf = _conf(sample, first)
    for path in _recordings(file):
        with suppress(TorchmemError, OSError):
            shown = _shown(path, device.index, conf)
            if shown:
                ago = format_seconds(max(0.0, sample.timestamp - path.stat().st_mtime))
                return f"A replay of its recording, {ago} old: {shown}"
    return None


def _conf(sample: Sample, remedy: Remedy) -> str:
    """Return the setting with those that are in effect and that a replay can keep."""
    present = parse_alloc_conf(sample.allocator_settings.get(LAST_PARSED, ""))
    kept = {key: value for key, value in present.items() if key in REQUEST_SETTINGS}
    return format_alloc_conf({**kept, str(remedy.setting): str(remedy.value)})


def _recordings(file: Path) -> Iterator[Path]:
    """Yield the recordings that are not too long, the newest first."""
    found = []
    for suffix in (OOM_RECORDING_SUFFIX, SNAPSHOT_SUFFIX):
        path = sibling_path(file, suffix)
        with suppress(OSError):
            status = path.lstat()
            found.append((status.st_mtime, status.st_size, path))
    for _, size, path in sorted(found, reverse=True):
        if size <= MAX_BYTES:
            yield path


def _shown(path: Path, device: int, conf: str) -> str | None:
    from torchmem.trace import read
    from torchmem.whatif.engine import what_if

    for recording in read(path):
        if recording.device == device and len(recording.events) <= MAX_EVENTS:
            answer = what_if(recording, settings=[conf])
            if not answer.fidelity.trusted:
                return None
            is_better = answer.verdict.decision == "change"
            return answer.verdict.sentence if is_better else f"{conf} shows no gain."
    return None
