"""A file with a snapshot: its traces, and what holds the memory at one of its moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchmem.output.terminal import StatusLine
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace import StackedTrace, read_with_stacks
from torchmem.trace.holders import Holders, holders
from torchmem.trace.lifetimes import At, Lifetimes


def read_traces(path: Path, device: int | None) -> Sequence[StackedTrace]:
    """Return the traces of a file, of one device if given. Raise UsageError."""
    label = f"reading {sanitize_text(path.name)}"
    with StatusLine() as status:
        traces = read_with_stacks(path, lambda done, total: status.show(lambda: label, done, total))
    if device is None:
        return traces
    chosen = [trace for trace in traces if trace.device == device]
    if not chosen:
        devices = ", ".join(str(trace.device) for trace in traces)
        raise UsageError(
            f"{sanitize_text(str(path))} has nothing of cuda:{device}: pass --gpu with one of "
            f"{devices}."
        )
    return chosen


def examine(trace: StackedTrace, path: Path, at: At | None) -> tuple[Lifetimes, Holders]:
    """Return what holds the memory at a moment. Raise UsageError without an OutOfMemoryError."""
    lifetimes = Lifetimes.of(trace)
    if at is None:
        found = holders(lifetimes, "oom") or holders(lifetimes, "end")
    else:
        found = holders(lifetimes, at)
    if found is None:
        raise UsageError(
            f"{sanitize_text(str(path))} records no OutOfMemoryError: pass --at end or --at peak."
        )
    return lifetimes, found
