"""Answers about the ranks of a run directory, by the code of the commands."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.capture.processes import ProcessFilter, find_process
from torchmem.cli.gpus import gpu_indices
from torchmem.cli.terminal import joined, wrapped
from torchmem.explain.headline import headline
from torchmem.explain.held_lines import held_lines
from torchmem.explain.oom_report import OomReport, format_seconds
from torchmem.explain.parts import component_words, device_parts, part_words
from torchmem.explain.rank_report import heading
from torchmem.mcp import ranks
from torchmem.mcp.answer import MAX_REPORTS, ToolAnswer
from torchmem.oom import command as oom
from torchmem.oom import text as oom_text
from torchmem.oom.recorded import recorded_leaks
from torchmem.oom.text import memory_lines
from torchmem.pages import sections
from torchmem.report import command as report
from torchmem.sample.capture_messages import (
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
    SNAPSHOT_SUFFIX,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import DeviceSample, Sample
from torchmem.sample.untrusted import sanitize_text

RECORDINGS = (SNAPSHOT_SUFFIX, OOM_SNAPSHOT_SUFFIX, OOM_RECORDING_SUFFIX)


class LocalNode:
    """The ranks and reports of this user in a run directory; of root, those of all users."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def list_ranks(self, run: str | None = None) -> ToolAnswer:
        """Return the ranks, one for each GPU that they use."""
        rows = ranks.of_run_directory(self._directory)
        return ranks.answer(rows, f"the run directory {self._directory}", run)

    def rank_report(self, selected: ProcessFilter) -> ToolAnswer:
        """Return what `torchmem report` prints about a rank."""
        found = report.reported(self._directory, selected)
        return ToolAnswer(found.page(), found.document())

    def what_holds_memory(self, selected: ProcessFilter) -> ToolAnswer:
        """Return the parts of a rank's memory, and the lines that hold it as far as known."""
        process = find_process(self._directory, selected, or_ended=True)
        sample, now, gpus = report.load(process), time.time(), gpu_indices()
        parts = [list(_holders(sample, device, now, gpus)) for device in sample.devices]
        lines = list(self._lines(process.sample, now))
        recordings = list(_recordings(process.sample))
        known = [f"  {path} ({format_seconds(now - at)} ago)" for path, at in recordings]
        found = known and ["Recordings of this rank, for read_snapshot", *known]
        data = {
            "run": sample.process.run,
            "launch": process.process.launch,
            "rank": sample.process.rank,
            "devices": [_holder_data(sample, device) for device in sample.devices],
            "recordings": [path for path, _ in recordings],
        }
        return ToolAnswer(joined([*parts, lines, found]), data)

    def _lines(self, sample: Path, now: float) -> Iterator[str]:
        """Yield the lines that held memory at the newest OOM of a process, if they are known."""
        name = sample.name.removesuffix(SAMPLE_SUFFIX)
        for path, found in self._reports():
            if path.name.startswith(f"{name}-") and found.lines is not None:
                yield f"At its OutOfMemoryError, {format_seconds(now - found.oom.timestamp)} ago:"
                yield from held_lines(found)
                return

    def oom_reports(self, run: str | None = None) -> ToolAnswer:
        """Return the newest reports, of a run or of all."""
        newest = oom.load_all(self._directory, limit=MAX_REPORTS)
        reports = [(path, found) for path, found in newest if run in {None, found.process.run}]
        data = {"reports": [_summary(path, found) for path, found in reports]}
        none = f"None of the newest {MAX_REPORTS} reports is of run {sanitize_text(str(run))}.\n"
        return ToolAnswer(oom_text.table(reports) or none, data, "Pass `run`.")

    def explain_oom(self, file: str | None, selected: ProcessFilter) -> ToolAnswer:
        """Return what `torchmem oom` prints: about a file, or the newest report of a rank."""
        if file is not None:
            path = Path(file)
            found = oom.load(path)
        else:
            path, found = self._newest(selected)
        leaking = recorded_leaks(path, found)
        words = oom_text.page(path, found, gpu_indices(), leaking)
        whole = oom.document(found, leaking)
        verdict_first = {"file": str(path), "verdict": whole.pop("verdict"), **whole}
        return ToolAnswer(words, verdict_first)

    def _newest(self, selected: ProcessFilter) -> tuple[Path, OomReport]:
        for path, found in oom.load_all(self._directory, limit=MAX_REPORTS):
            if selected.selects(found.process):
                return path, found
        raise UsageError(
            f"none of the newest {MAX_REPORTS} OOM reports matches: call oom_reports for a list."
        )

    def _reports(self) -> list[tuple[Path, OomReport]]:
        with suppress(UsageError):
            return oom.load_all(self._directory, limit=MAX_REPORTS)
        return []


def _holders(
    sample: Sample, device: DeviceSample, now: float, gpus: Mapping[str, int]
) -> Iterator[str]:
    """Yield who the rank is, the parts of its GPU, and those at the peak."""
    yield from heading(sample, device, now, gpus.get(device.uuid or ""))
    parts = _parts(sample, device)
    read = device.stats_timestamp
    yield from memory_lines(device.total_bytes, parts, None if read is None else now - read)
    if not parts:
        yield "What its memory is used for is not known."
    at_peak = ", ".join(f"{name} {format_size(size)}" for name, size in _peak(device).items())
    if at_peak:
        yield from wrapped(f"At the peak of its tensors: {at_peak}.")


def _parts(sample: Sample, device: DeviceSample) -> list[tuple[str, int]]:
    known = device_parts(device, device.driver_free_bytes)
    return [(part_words(part, sample.steps.unread), part.bytes) for part in known]


def _peak(device: DeviceSample) -> dict[str, int]:
    """Return the parts at the peak in words, the largest first."""
    largest = sorted(device.component_peaks.items(), key=lambda item: -item[1])
    return {component_words(name): size for name, size in largest if size}


def _holder_data(sample: Sample, device: DeviceSample) -> dict[str, Any]:
    return {
        "index": device.index,
        "uuid": device.uuid,
        "total_bytes": device.total_bytes,
        "read_time": device.stats_timestamp,
        "parts": sections.parts(
            device_parts(device, device.driver_free_bytes), sample.steps.unread
        ),
        "parts_at_peak": _peak(device),
        "growth": asdict(device.growth) if device.growth else None,
    }


def _recordings(sample: Path) -> Iterator[tuple[str, float]]:
    """Yield the snapshots that lie beside a sample, with the times of writing."""
    for suffix in RECORDINGS:
        path = sibling_path(sample, suffix)
        with suppress(OSError):
            yield str(path), path.lstat().st_mtime


def _summary(path: Path, found: OomReport) -> dict[str, Any]:
    process, record = found.process, found.oom
    return {
        "file": str(path),
        "time": record.timestamp,
        "run": process.run,
        "launch": process.launch,
        "rank": process.rank,
        "cause": record.cause,
        "detail": record.detail,
        "onset": record.onset,
        "requested_bytes": record.requested_bytes,
        "headline": headline(found),
    }
