"""What holds the bytes in use at one moment, in groups: by line, module path, size, age, and pool.

If PyTorch wrote them, also by what the program was doing: the ranges of record_function, the
metadata that it set, and the compiled regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchmem.allocator.sizes import SMALL_SIZE, format_size
from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.trace.annotations import MAX_SHOWN, open_ranges
from torchmem.trace.frames import call_stack, module_path
from torchmem.trace.lifetimes import BEFORE, At, Lifetimes
from torchmem.trace.recording import SegmentPools
from torchmem.trace.stacks import NO_STACK, NO_TEXT

NO_LINE = "no Python stack"
BEFORE_RECORDING = "before the recording"
NO_MODULE = "outside of any forward"
NO_RANGE = "outside of any range"
NO_METADATA = "without metadata"
NO_REGION = "not compiled"
AGES: tuple[tuple[float, str], ...] = (
    (0.1, "up to 0.1 s"),
    (1, "0.1 to 1 s"),
    (10, "1 to 10 s"),
    (60, "10 s to 1 min"),
    (600, "1 to 10 min"),
    (float("inf"), "over 10 min"),
)
UNKNOWN_AGE = "unknown"


@dataclass(frozen=True, slots=True)
class HolderLine:
    """The line of Python that allocated; `line` is None if unknown."""

    file: str
    line: int | None = None
    function: str = ""

    @property
    def text(self) -> str:
        """The file, line and function."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}  {self.function}".rstrip()


@dataclass(frozen=True, slots=True)
class HolderGroup:
    """Allocations with one key: requested bytes, and number of blocks."""

    key: str
    size_bytes: int
    blocks: int
    line: HolderLine | None = None


@dataclass(frozen=True, slots=True)
class Holders:
    """Everything in use at one moment, in groups, the largest first; ages and pools in order.

    `moment` is the number of the event that follows it. `seconds` is the time since the first
    event, if known. `rounding_bytes`: what rounding adds, known at the end only. `request`: at an
    OutOfMemoryError, the request that failed. `has_stacks`: whether any line is known.
    """

    name: str
    device: int
    at: At
    moment: int
    events: int
    seconds: float | None
    size_bytes: int
    blocks: int
    rounding_bytes: int | None
    by_line: tuple[HolderGroup, ...]
    by_module: tuple[HolderGroup, ...]
    by_size: tuple[HolderGroup, ...]
    by_age: tuple[HolderGroup, ...]
    by_pool: tuple[HolderGroup, ...]
    by_annotation: tuple[HolderGroup, ...] = ()
    by_metadata: tuple[HolderGroup, ...] = ()
    by_region: tuple[HolderGroup, ...] = ()
    request: HolderGroup | None = None
    has_stacks: bool = True


class LineFinder:
    """Finds the line and the module path of a stack, each once."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._stacks = lifetimes.trace.stacks
        self._known: dict[int, tuple[HolderLine, str]] = {}

    def line(self, number: int, *, is_before: bool = False) -> HolderLine:
        """Return the innermost line of the user's program.

        If it is unknown, the result has a description as its file, and no number.
        """
        if number == NO_STACK and is_before:
            return HolderLine(BEFORE_RECORDING)
        return self._of(number)[0]

    def module(self, number: int) -> str:
        """Return the path of `forward` calls."""
        return self._of(number)[1]

    def _of(self, number: int) -> tuple[HolderLine, str]:
        if number not in self._known:
            stack = call_stack(self._stacks.of(number))
            frame = stack.line
            line = (
                HolderLine(frame.file, frame.line, frame.function) if frame else HolderLine(NO_LINE)
            )
            self._known[number] = line, module_path(stack) or NO_MODULE
        return self._known[number]


def holders(lifetimes: Lifetimes, at: At) -> Holders | None:
    """Return what is in use at a moment; None if the snapshot has no such moment."""
    moment = lifetimes.moment(at)
    if moment is None:
        return None
    numbers = list(lifetimes.in_use(moment))
    lines = LineFinder(lifetimes)
    total = sum(lifetimes.sizes[number] for number in numbers)
    times = lifetimes.trace.events.times
    now = lifetimes.time(moment)

    def grouped(key: Callable[[int], str]) -> tuple[HolderGroup, ...]:
        return largest_first(groups(lifetimes, numbers, key))

    by_age = {group.key: group for group in grouped(lambda n: _age(lifetimes, n, moment))}
    order = [*(label for _, label in AGES), BEFORE_RECORDING, UNKNOWN_AGE]
    labels = _Labels(lifetimes, numbers)
    return Holders(
        name=lifetimes.trace.name,
        device=lifetimes.trace.device,
        at=at,
        moment=moment,
        events=lifetimes.events,
        seconds=None if now is None else (now - times[0]) / 1e6,
        size_bytes=total,
        blocks=len(numbers),
        rounding_bytes=_allocated(lifetimes) - total if at == "end" else None,
        by_line=by_line(lifetimes, numbers, lines),
        by_module=_unless_all(NO_MODULE, grouped(lambda n: lines.module(lifetimes.stacks[n]))),
        by_size=grouped(lambda n: format_size(lifetimes.sizes[n])),
        by_age=tuple(by_age[label] for label in order if label in by_age),
        by_pool=grouped(_Pools(lifetimes).name),
        by_annotation=_unless_all(NO_RANGE, grouped(labels.annotation)),
        by_metadata=_unless_all(NO_METADATA, grouped(labels.metadata)),
        by_region=_unless_all(NO_REGION, grouped(labels.region)),
        request=_request(lifetimes, moment, lines) if at == "oom" else None,
        has_stacks=bool(lifetimes.trace.stacks.stacks),
    )


def _unless_all(none: str, found: tuple[HolderGroup, ...]) -> tuple[HolderGroup, ...]:
    """Return the groups; nothing if there is none beside `none` and what was there before."""
    return () if {group.key for group in found} <= {none, BEFORE_RECORDING} else found


def _request(lifetimes: Lifetimes, moment: int, lines: LineFinder) -> HolderGroup:
    size = lifetimes.trace.columns.sizes[moment]
    line = lines.line(lifetimes.trace.events.numbers[moment])
    return HolderGroup(line.text, size, 1, line if line.line else None)


def by_line(
    lifetimes: Lifetimes, numbers: Iterable[int], lines: LineFinder
) -> tuple[HolderGroup, ...]:
    """Return the allocations by line, the largest first."""
    found: dict[HolderLine, list[int]] = {}
    for number in numbers:
        is_before = lifetimes.starts[number] == BEFORE
        line = lines.line(lifetimes.stacks[number], is_before=is_before)
        found.setdefault(line, []).append(lifetimes.sizes[number])
    return largest_first(
        HolderGroup(line.text, sum(sizes), len(sizes), line) for line, sizes in found.items()
    )


def groups(
    lifetimes: Lifetimes, numbers: Iterable[int], key: Callable[[int], str]
) -> Iterable[HolderGroup]:
    """Return the allocations by a key."""
    found: dict[str, list[int]] = {}
    for number in numbers:
        found.setdefault(key(number), []).append(lifetimes.sizes[number])
    return (HolderGroup(name, sum(sizes), len(sizes)) for name, sizes in found.items())


def largest_first(found: Iterable[HolderGroup]) -> tuple[HolderGroup, ...]:
    """Return the groups by bytes, and by name among equals."""
    return tuple(sorted(found, key=lambda group: (-group.size_bytes, group.key)))


def _allocated(lifetimes: Lifetimes) -> int:
    return sum(
        block.size
        for segment in lifetimes.trace.segments
        for block in segment.blocks
        if block.state == "active_allocated"
    )


def _age(lifetimes: Lifetimes, number: int, moment: int) -> str:
    if lifetimes.starts[number] == BEFORE:
        return BEFORE_RECORDING
    seconds = lifetimes.age(number, moment)
    if seconds is None:
        return UNKNOWN_AGE
    return next(label for limit, label in AGES if seconds <= limit)


class _Pools:
    """Finds the pool of an allocation: by its event, else by the segment at its address.

    PyTorch before 2.12 records no pools of events.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._of_segment = SegmentPools(lifetimes.trace.segments)
        self._ids = tuple(lifetimes.trace.columns.pool_ids)

    def name(self, number: int) -> str:
        """Return `small`, `large`, or the private pool with its id."""
        start = self._lifetimes.starts[number]
        index = -1 if start == BEFORE else self._lifetimes.trace.columns.pools[start]
        address = self._lifetimes.addresses[number]
        pool = self._of_segment.at(address) if index < 0 else self._ids[index]
        if pool != DEFAULT_POOL:
            return f"private pool {pool[0]}, {pool[1]}"
        return "small" if self._lifetimes.sizes[number] <= SMALL_SIZE else "large"


class _Labels:
    """Finds what the program was doing when it made an allocation."""

    def __init__(self, lifetimes: Lifetimes, numbers: Iterable[int]) -> None:
        trace = lifetimes.trace
        self._starts, self._texts, self._events = lifetimes.starts, trace.texts, trace.events
        wanted = {lifetimes.starts[number] for number in numbers} if trace.annotations else set()
        self._ranges = {
            event: path
            for event, path in enumerate(open_ranges(trace.annotations, trace.events.times))
            if event in wanted
        }

    def annotation(self, number: int) -> str:
        """Return the path of record_function's ranges, from the outermost one inwards."""
        if self._starts[number] == BEFORE:
            return BEFORE_RECORDING
        path = self._ranges.get(self._starts[number], ())
        return " > ".join(self._texts[name] for name in path[-MAX_SHOWN:]) or NO_RANGE

    def metadata(self, number: int) -> str:
        """Return the text of torch.cuda.memory._set_memory_metadata."""
        return self._text(number, self._events.metadata, NO_METADATA)

    def region(self, number: int) -> str:
        """Return the region of torch.compile."""
        return self._text(number, self._events.regions, NO_REGION)

    def _text(self, number: int, column: Sequence[int], none: str) -> str:
        start = self._starts[number]
        if start == BEFORE:
            return BEFORE_RECORDING
        return none if column[start] == NO_TEXT else self._texts[column[start]]
