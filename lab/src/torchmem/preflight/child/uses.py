"""Divides what was allocated at the peak of a trace by component, module and line.

All sizes are bytes. Sizes in a trace are requested bytes; what the allocator adds to them is the
component `rounding`.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import round_size
from torchmem.allocator.snapshot import FrameInfo
from torchmem.compare.peak_memory import SourceLine, Use, merged
from torchmem.explain.lines import recorded_line
from torchmem.preflight.result import Phase
from torchmem.sample.untrusted import sanitize_text

ModuleOf = Callable[[Sequence[FrameInfo]], "str | None"]
_COUNTED = frozenset({"alloc", "free_requested"})
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/|.*/lib(?:64)?/python3[\d.]*t?/")
_ROOT_MARKS = (".git", "pyproject.toml", "setup.cfg", "setup.py")


Owner = tuple[str, "str | None"]
"""A component, and a module's path as in `named_modules`, with `*` for numbers."""
Owners = Mapping[int, Mapping[int, Owner]]
"""The owner of the memory at each address, by device."""


@dataclass(frozen=True, slots=True)
class TraceMark:
    """What begins or is known at a position of each device's trace.

    phase: the phase that begins. begins_step: whether a step begins. frames: the Python stack of
    the thread that calls backward, innermost first. owners: what is at addresses now. frees: who
    owned what is freed from now on, None if that is unknown.
    """

    positions: Mapping[int, int]
    phase: Phase | None = None
    begins_step: bool = False
    frames: Sequence[FrameInfo] = ()
    owners: Owners = field(default_factory=dict)
    frees: Owner | None = None


@dataclass(slots=True)
class _Allocation:
    """One allocation: when it was in use, and what is known of it."""

    size: int
    frames: Sequence[FrameInfo]
    start: int
    phase: Phase
    step: int
    end: int | None = None
    owner: Owner | None = None

    def is_in_use(self, events: int) -> bool:
        """Whether it is in use after this number of events."""
        return self.start < events and (self.end is None or self.end >= events)


@dataclass(frozen=True, slots=True)
class Trace:
    """What PyTorch has recorded on one device, and the marks noted meanwhile.

    start, end: the device's positions when the recording began and when the trace was taken.
    since: the position from which on the peak counts.
    """

    events: Iterable[Mapping[str, Any]]
    marks: Iterable[TraceMark]
    start: int
    end: int
    since: int


@dataclass(frozen=True, slots=True)
class TracePeak:
    """The highest sum of rounded sizes in a trace, and what was in use then."""

    rounded: int
    uses: tuple[Use, ...]


class SourceLines:
    """Finds the lines of a program, with paths that are the same on every machine."""

    def __init__(self, root: Path) -> None:
        """`root`: the repository, to which paths are relative."""
        self._root = f"{root}/"
        self._known: dict[tuple[str, int, str], SourceLine] = {}

    def of(self, frames: Sequence[FrameInfo]) -> SourceLine | None:
        """Return the user's line; None without a stack."""
        return self._line(frames[recorded_line(frames)]) if frames else None

    def _line(self, frame: FrameInfo) -> SourceLine:
        key = frame["filename"], frame["line"], frame["name"]
        if key not in self._known:
            code = linecache.getline(key[0], key[1]).strip()
            self._known[key] = SourceLine(
                sanitize_text(self._path(key[0])), key[1], key[2], sanitize_text(code)
            )
        return self._known[key]

    def _path(self, file: str) -> str:
        if file.startswith(self._root) and not _PACKAGES.match(file):
            return file[len(self._root) :]
        installed = _PACKAGES.match(file)
        return file[installed.end() :] if installed else file.rpartition("/")[2]


def repository(folder: Path) -> Path:
    """Return the folder at or above this one that is the root of a repository, else itself."""
    above = (each for each in (folder, *folder.parents) if _is_root(each))
    return next(above, folder)


def _is_root(folder: Path) -> bool:
    return any((folder / name).exists() for name in _ROOT_MARKS)


def trace_peak(
    trace: Trace, device: int, module_of: ModuleOf, lines: SourceLines
) -> TracePeak | None:
    """Return the peak of one device's trace; None if the trace is not complete."""
    read = _AllocationHistory(trace, device)
    if len(read.levels) != trace.end - trace.start + 1:
        return None
    peak = max(range(trace.since - trace.start, len(read.levels)), key=read.levels.__getitem__)
    in_use = [each for each in read.allocations if each.is_in_use(peak)]
    step = max((each.step for each in read.allocations if each.start < peak), default=0)
    uses = (_use(each, step, module_of, lines) for each in in_use)
    return TracePeak(read.levels[peak], merged(uses))


def uses_left(
    trace: Trace, device: int, module_of: ModuleOf, lines: SourceLines
) -> tuple[Use, ...]:
    """Return what was allocated after `since` and is still in use at the end of a trace."""
    read = _AllocationHistory(trace, device)
    since = trace.since - trace.start
    left = (each for each in read.allocations if each.end is None and each.start >= since)
    return merged(_use(each, 0, module_of, lines) for each in left)


def with_rounding(uses: tuple[Use, ...], peak_allocated: int) -> tuple[Use, ...]:
    """Return the uses with what rounding adds up to the peak; none if they exceed it."""
    rest = peak_allocated - sum(use.bytes for use in uses)
    if rest < 0 or not uses:
        return ()
    return merged([*uses, Use("rounding", rest)] if rest else uses)


class _AllocationHistory:
    """The allocations of one trace, and the rounded bytes after each of its counted events."""

    def __init__(self, trace: Trace, device: int) -> None:
        self.allocations: list[_Allocation] = []
        self.levels = [0]
        self._device = device
        self._live: dict[int, _Allocation] = {}
        self._phase: Phase = "setup"
        self._step = 0
        self._backward: Sequence[FrameInfo] = ()
        self._frees: Owner | None = None
        left = _by_position(trace.marks, device, trace.start)
        for event in trace.events:
            if event["action"] in _COUNTED:
                self._pass(left)
                self._count(event)
        self._pass(left)

    def _pass(self, left: list[tuple[int, TraceMark]]) -> None:
        """Take the marks up to the current position."""
        while left and left[-1][0] < len(self.levels):
            mark = left.pop()[1]
            self._step += mark.begins_step
            self._phase = mark.phase or self._phase
            self._backward = mark.frames or self._backward
            self._frees = mark.frees
            for address, owner in mark.owners.get(self._device, {}).items():
                if address in self._live:
                    self._live[address].owner = owner

    def _count(self, event: Mapping[str, Any]) -> None:
        size = round_size(event["size"])
        if event["action"] == "alloc":
            frames = event.get("frames") or self._frames()
            allocation = _Allocation(
                event["size"], frames, len(self.levels) - 1, self._phase, self._step
            )
            self.allocations.append(allocation)
            self._live[event["addr"]] = allocation
            self.levels.append(self.levels[-1] + size)
        else:
            ended = self._live.pop(event["addr"], None)
            if ended is not None:
                ended.end = len(self.levels) - 1
                ended.owner = self._frees or ended.owner
            self.levels.append(self.levels[-1] - (size if ended else 0))

    def _frames(self) -> Sequence[FrameInfo]:
        """Return the stack that called the backward pass, whose threads have none of Python."""
        return self._backward if self._phase == "backward" else ()


def _by_position(
    marks: Iterable[TraceMark], device: int, start: int
) -> list[tuple[int, TraceMark]]:
    """Return the marks with their positions in the trace, the last one first."""
    placed = [(max(0, each.positions.get(device, start) - start), each) for each in marks]
    return sorted(placed, key=lambda pair: pair[0])[::-1]


def _use(
    allocation: _Allocation,
    step: int,
    module_of: ModuleOf,
    lines: SourceLines,
) -> Use:
    line = lines.of(allocation.frames)
    if allocation.owner is not None:
        component, module = allocation.owner
        return Use(component, allocation.size, module, line)
    module = module_of(allocation.frames) if allocation.frames else None
    return Use(_component(allocation, step), allocation.size, module, line)


def _component(allocation: _Allocation, step: int) -> str:
    if allocation.step < step:
        return "held"
    is_in_forward = any(frame["name"] == "forward" for frame in allocation.frames)
    return "activations" if is_in_forward or allocation.phase == "forward" else "temporaries"
