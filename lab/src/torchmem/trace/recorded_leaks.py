"""The judgment of `torchmem why --leaks` on a recording beside an OOM report, as text.

A recording has stacks with `capture_on_oom="trace"` and `history=True`, or from `torchmem capture`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.explain.call_stack import Frame, package_of, public_place
from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport
from torchmem.explain.where import place
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.sample.errors import TorchmemError
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace import read_with_stacks
from torchmem.trace.leaks import PARTS, WARMUP_PARTS, Leak, is_long_enough, leaks
from torchmem.trace.lifetimes import Lifetimes

MAX_BYTES = 64 << 20
"""Larger files would take more than a few seconds: `torchmem why --leaks` reads them."""
MAX_EVENTS = 500_000
MAX_WRITING_SECONDS = 60.0
"""The longest time between an OOM and the end of writing its recording."""
MIN_SHARE = 0.01
"""A share of the GPU; lines that kept less do not explain an OutOfMemoryError."""
MAX_LEAKS = 3


def recorded_leaks(report_path: Path, report: OomReport) -> tuple[Leak, ...]:
    """Return the lines that leak according to the recording of this OOM or an earlier capture.

    Empty if there is no such file, if it has no stacks, or if it cannot be used.
    """
    for path in _recordings(report_path, report):
        with suppress(TorchmemError):
            found = _worth(_leaks(path, report.device.index), report)
            if found:
                return found
    return ()


def _recordings(report_path: Path, report: OomReport) -> Iterator[Path]:
    """Yield the recordings that may show what led to the OOM, the best one first."""
    process = report_path.name.removesuffix(REPORT_SUFFIX).rpartition("-")[0]
    happened = report.oom.timestamp
    suffixes = [(SNAPSHOT_SUFFIX, 0.0)]
    if report.lines is not None:  # otherwise its recording has no stacks either
        suffixes.insert(0, (OOM_RECORDING_SUFFIX, happened - 1))
    for suffix, since in suffixes:
        path = report_path.with_name(process + suffix)
        with suppress(OSError):
            status = path.lstat()
            is_fitting = since <= status.st_mtime <= happened + MAX_WRITING_SECONDS
            if is_fitting and status.st_size <= MAX_BYTES:
                yield path


def _leaks(path: Path, device: int) -> Iterable[Leak]:
    for trace in read_with_stacks(path):
        if trace.device == device and len(trace.columns.codes) <= MAX_EVENTS:
            lifetimes = Lifetimes.of(trace)
            if trace.stacks.stacks and is_long_enough(lifetimes):
                return leaks(lifetimes)
    return ()


def _worth(found: Iterable[Leak], report: OomReport) -> tuple[Leak, ...]:
    least = MIN_SHARE * (report.device.total_bytes or 0)
    known = (leak for leak in found if leak.line.line is not None and leak.size_bytes >= least)
    return tuple(known)[:MAX_LEAKS]


def sentence(report: OomReport, found: Sequence[Leak]) -> str:
    """Return the headline, with the line that leaks if only the recording shows it."""
    text = headline(report)
    is_known = report.lines is not None and bool(report.lines.grown)
    if report.oom.onset != "leak" or is_known or not found:
        return text
    where = " in ".join(public_place(_frame(found[0])))
    return f"{text}; according to the recording, allocated at {where}"


def leak_documents(found: Sequence[Leak]) -> list[dict[str, Any]]:
    """Return the lines that leak, for JSON."""
    return [
        {
            "file": sanitize_text(leak.line.file),
            "line": leak.line.line,
            "function": sanitize_text(leak.line.function),
            "bytes": leak.size_bytes,
            "blocks": leak.blocks,
        }
        for leak in found
    ]


def leak_lines(found: Sequence[Leak]) -> Iterator[str]:
    """Yield the lines of the section; none without a leak."""
    if not found:
        return
    later = PARTS - WARMUP_PARTS
    parts = f"each of the last {later} of {PARTS} parts of the recording"
    yield f"Lines that leak, which kept memory in {parts}"
    for leak in found:
        blocks = f"{leak.blocks:,} block{'s' * (leak.blocks != 1)}"
        yield f"  {format_size(leak.size_bytes):>12}  {place(_frame(leak))}  ({blocks})"


def _frame(leak: Leak) -> Frame:
    line = leak.line
    file = sanitize_text(line.file)
    return Frame(file, line.line, sanitize_text(line.function), package_of(file))
