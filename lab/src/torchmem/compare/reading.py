"""Reads what can be compared; any user may have written the files.

Snapshots are read as by `torchmem why`, which unpickles plain data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.allocator.sizes import round_size
from torchmem.compare import baseline, preflight_documents
from torchmem.compare.measured import Ending, Measured, Side
from torchmem.compare.peak_memory import PeakMemory, SourceLine, Use
from torchmem.explain.headline import headline
from torchmem.explain.run_summary import DeviceSummary, RunSummary, headroom_at_peak
from torchmem.node.reports import load as load_report
from torchmem.node.summaries import last_summary, read_summary, summaries_below
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import (
    HEAD_BYTES,
    OOM_REPORT,
    PREFLIGHT,
    SAMPLE,
    SNAPSHOT,
    SUMMARY,
    FileKind,
    check_kind,
    kind_of,
)
from torchmem.sample.sample import Process, State
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted, sanitize_text

if TYPE_CHECKING:
    from torchmem.trace import StackedTrace
    from torchmem.trace.holders import HolderLine as SnapshotLine

MAX_FILE_BYTES = 1 << 62
WANTED = "a summary, an OOM report, a preflight's JSON, a baseline or a memory snapshot"
_ENDINGS: Mapping[State, Ending] = {"exited": "whole", "oom": "oom"}


def read_side(path: Path) -> Side:
    """Read one side of a comparison. Raises UsageError."""
    name = sanitize_text(str(path))
    if path.is_dir():
        return _directory(path, name)
    head = _head(path, name)
    reader = _READERS.get(kind_of(head) or _baseline_kind(head))
    if reader is None:
        check_kind(path, head, None, WANTED)
        raise UsageError(f"{name} is not {WANTED}: name one of these.")
    side = reader(path, name)
    if not side.parts:
        raise UsageError(f"{name} has no peak of GPU memory: name a run that used a GPU.")
    return side


def _head(path: Path, name: str) -> bytes:
    try:
        with open_untrusted(path, MAX_FILE_BYTES) as (file, _):
            return file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"{name} does not exist: run `torchmem compare --list` for the summaries of your runs."
        ) from None
    except UntrustedFileError as error:
        raise UsageError(f"{name} {error}: name {WANTED}.") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read ({error.strerror}): name {WANTED}.") from None


_BASELINE = FileKind("a baseline", "run `torchmem preflight --baseline {file}`")


def _baseline_kind(head: bytes) -> FileKind | None:
    start = head[:4096]
    is_baseline = b'"schema"' in start and b'"entries"' in start and b'"torch"' in start
    return _BASELINE if is_baseline else None


def _directory(path: Path, name: str) -> Side:
    """Return the newest process of each rank in a directory of summaries."""
    newest: dict[int, RunSummary] = {}
    found = [summary for _, summary in summaries_below(path)]
    runs = sorted({summary.process.run for summary in found})
    if len(runs) > 1:
        names = ", ".join(map(sanitize_text, runs[:4]))
        raise UsageError(f"{name} has summaries of several runs ({names}): name one of its files.")
    for summary in found:
        newest.setdefault(summary.process.rank, summary)
    if not newest:
        raise UsageError(f"{name} has no summary of a run: name a file, or another directory.")
    parts: dict[str, Measured] = {}
    for rank in sorted(newest):
        own = _summary_parts(newest[rank])
        for label, each in own.items():
            parts[f"rank {rank} {label}" if len(own) > 1 else f"rank {rank}"] = each
    return Side(name, "the summaries of a run", "directory", parts, _facts(newest[min(newest)]))


def _summary(path: Path, name: str) -> Side:
    return _of_summary(name, "the summary of a run", read_summary(path))


def _of_summary(name: str, noun: str, found: RunSummary) -> Side:
    return Side(name, noun, "run", _summary_parts(found), _facts(found), found.verdict)


def _sample(path: Path, name: str) -> Side:
    return _of_summary(name, "the last sample of a run", last_summary(path))


def _summary_parts(summary: RunSummary) -> dict[str, Measured]:
    return {
        f"cuda:{device.index}": _measured(summary, device)
        for device in summary.devices
        if device.allocated_peak_bytes is not None or device.reserved_peak_bytes is not None
    }


def _measured(summary: RunSummary, device: DeviceSummary) -> Measured:
    ending = _ENDINGS.get(summary.state, "cut_off")
    uses = _uses(device.component_peaks or (device.components if ending == "oom" else {}))
    return Measured(
        memory=PeakMemory(device.allocated_peak_bytes, device.reserved_peak_bytes, uses=uses),
        ending=ending,
        fits=ending != "oom",
        total=device.total_bytes,
        headroom=device.headroom_bytes if ending != "oom" else None,
        retries=device.counters.alloc_retries,
        steps=summary.steps,
        step_seconds=summary.mean_step_seconds,
        is_whole_peak=ending == "whole",
    )


def _facts(summary: RunSummary) -> dict[str, str]:
    names = [device.name for device in summary.devices if device.name]
    return _process_facts(summary.process, names, summary.allocator_settings)


def _process_facts(
    process: Process, gpus: Sequence[str], settings: Mapping[str, str]
) -> dict[str, str]:
    world = process.world_size
    facts = {
        "PyTorch": process.versions.get("torch", ""),
        "CUDA": process.versions.get("cuda", ""),
        "GPU": ", ".join(dict.fromkeys(gpus)),
        "world size": "" if world is None else str(world),
        **{f"allocator setting {name}": value for name, value in settings.items()},
    }
    return {name: value for name, value in facts.items() if value}


def _oom_report(path: Path, name: str) -> Side:
    report = load_report(path)
    allocator = report.device.allocator
    if allocator is None:
        return Side(name, "an OOM report", "run", {})
    measured = Measured(
        memory=PeakMemory(
            allocator.allocated_peak_bytes,
            allocator.reserved_peak_bytes,
            uses=_uses(report.device.component_peaks or report.device.components),
        ),
        ending="cut_off" if report.survived else "oom",
        fits=False,
        total=report.device.total_bytes,
        headroom=headroom_at_peak(report.device) if report.survived else None,
        retries=report.device.counters.alloc_retries,
        steps=report.steps.count,
        step_seconds=report.steps.mean_seconds,
        is_whole_peak=False,
    )
    gpus = [report.device.name] if report.device.name else []
    facts = _process_facts(report.process, gpus, report.allocator_settings)
    parts = {f"cuda:{report.device.index}": measured}
    return Side(name, "an OOM report", "run", parts, facts, f"{headline(report)}.")


def _uses(parts: Mapping[str, int]) -> tuple[Use, ...]:
    return tuple(Use(component, size) for component, size in parts.items())


def _snapshot(path: Path, name: str) -> Side:
    from torchmem.trace.snapshot_file import read_traces

    parts = {}
    for trace in read_traces(path, None):
        memory = _peak_of(trace)
        if memory is not None:
            parts[f"cuda:{trace.device}"] = Measured(memory)
    return Side(name, "a memory snapshot", "run", parts)


def _peak_of(trace: StackedTrace) -> PeakMemory | None:
    """Return what was in use at the peak of a recording, with the rounding of the allocator."""
    from torchmem.trace.holders import LineFinder, by_line
    from torchmem.trace.lifetimes import Lifetimes

    lifetimes = Lifetimes.of(trace)
    moment = lifetimes.moment("peak")
    numbers = list(lifetimes.in_use(moment)) if moment is not None else []
    if not numbers:
        return None
    uses = [
        Use("allocated", group.size_bytes, line=_line(group.line))
        for group in by_line(lifetimes, numbers, LineFinder(lifetimes))
    ]
    rounded = sum(round_size(lifetimes.sizes[number]) for number in numbers)
    rest = rounded - sum(use.bytes for use in uses)
    return PeakMemory(rounded, uses=(*uses, *([Use("rounding", rest)] if rest > 0 else [])))


def _line(line: SnapshotLine | None) -> SourceLine | None:
    if line is None or line.line is None:
        return None
    return SourceLine(line.file, line.line, line.function)


def _baseline(path: Path, name: str) -> Side:
    entries = baseline.load(path).entries
    parts = {sanitize_text(key): Measured(entry.memory) for key, entry in entries.items()}
    facts = {
        "PyTorch": ", ".join(sorted({entry.torch for entry in entries.values()})),
        "GPU": ", ".join(sorted({entry.gpu_model for entry in entries.values()})),
    }
    return Side(name, "a baseline", "baseline", parts, facts)


_READERS: Mapping[FileKind | None, Callable[[Path, str], Side]] = {
    SUMMARY: _summary,
    SAMPLE: _sample,
    OOM_REPORT: _oom_report,
    SNAPSHOT: _snapshot,
    PREFLIGHT: preflight_documents.read,
    _BASELINE: _baseline,
}
