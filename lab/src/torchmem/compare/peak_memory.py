"""What a run used at its peak, by component, module and line, and what differs between two runs.

All sizes are bytes. A part that is unknown is None or missing, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchmem.sample.untrusted import convert

MIN_SHARE = 1 / 1000
"""Uses below this share of the peak are added up per component: see `PeakMemory.condensed`."""

COMPONENT_ORDER = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "gradients_or_step",
    "step",
    "held",
    "workspaces",
    "pending",
    "rounding",
)
"""The components of a peak, in the order in which they are shown; a script's own parts follow.

activations: allocated in the forward part of the current step, including its inputs. temporaries:
allocated in its backward pass, in the optimizer's step or before the first forward pass, and none
of the others. held: allocated before the current step, and none of the others. workspaces: kept by
PyTorch for cuBLAS. The other names are those of `torchmem_component_peak_bytes`.
"""

HELD = "held"
"""The component of what earlier steps allocated and nothing else explains: a leak grows it."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python that allocated memory.

    file: relative to the repository; for an installed package it starts with the package's name.
    code: the text of the line without indentation, "" if unknown. It identifies the line when
    others are added above it.
    """

    file: str
    line: int | None = None
    function: str = ""
    code: str = ""

    @property
    def place(self) -> str:
        """The file and the line, as editors read them."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def key(self) -> tuple[str, ...]:
        """What is the same in another version of the file, as long as the line itself is."""
        return self.file, self.function, self.code or str(self.line or "")


@dataclass(frozen=True, slots=True)
class Use:
    """Memory in use for one component, one module and one line; None where that is unknown.

    module: names as in `named_modules`, with `*` for those that cannot be told apart, such as
    "encoder.layers.*.attention".
    """

    component: str
    bytes: int
    module: str | None = None
    line: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """What a run, or a part of one, used on one GPU.

    peak_allocated, peak_reserved: as `torch.cuda.max_memory_allocated` and `max_memory_reserved`
    return them. leaked: allocated at the end and not at the beginning. uses: what was allocated at
    the peak. They add up to peak_allocated, or are empty if it is not known what used the memory.
    """

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    leaked: int | None = None
    uses: tuple[Use, ...] = ()

    @property
    def by_component(self) -> dict[str, int]:
        """Bytes at the peak by component, in the order of `COMPONENT_ORDER`."""
        sums = added((use.component, use.bytes) for use in self.uses)
        return {name: sums[name] for name in sorted(sums, key=_order)}

    def condensed(self, share: float = MIN_SHARE) -> PeakMemory:
        """Return the same with uses below this share of the peak added up per component."""
        limit = share * (self.peak_allocated or 0)
        small = (replace(use, module=None, line=None) for use in self.uses if use.bytes < limit)
        large = (use for use in self.uses if use.bytes >= limit)
        return replace(self, uses=merged([*large, *small]))


@dataclass(frozen=True, slots=True)
class Change:
    """The bytes of one component, module or line in two peaks; None where it is not divided so."""

    before: int
    after: int
    component: str | None = None
    module: str | None = None
    line: SourceLine | None = None

    @property
    def bytes(self) -> int:
        """By how many bytes it grew; negative if it shrank."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class PeakDiff:
    """What changed from one peak to another.

    Each tuple has what differs, the largest growth first and the largest decrease last. by_module
    is by component and module, by_line by component, module and line; both are without what has no
    known module or line. An edited line is one line, see `_edited`.
    """

    before: PeakMemory
    after: PeakMemory
    by_component: tuple[Change, ...] = ()
    by_module: tuple[Change, ...] = ()
    by_line: tuple[Change, ...] = ()

    @property
    def held(self) -> int:
        """By how many bytes grew what steps leave for later ones; 0 if it did not."""
        changes = (each.bytes for each in self.by_component if each.component == HELD)
        return max(0, next(changes, 0))

    @property
    def peak_allocated(self) -> int | None:
        """By how many bytes the peak grew; None if one of the two is unknown."""
        before, after = self.before.peak_allocated, self.after.peak_allocated
        return None if before is None or after is None else after - before


def diff(before: PeakMemory, after: PeakMemory) -> PeakDiff:
    """Return what changed. Parts are compared only if both peaks have them."""
    if not (before.uses and after.uses):
        return PeakDiff(before, after)

    return PeakDiff(
        before,
        after,
        by_component=_changes(before, after, lambda use: Use(use.component, 0)),
        by_module=_changes(before, after, _of_module),
        by_line=_sorted(_edited(_changes(before, after, _of_line))),
    )


def merged(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Return one use for each component, module and line, in a stable order."""
    found: dict[tuple[Any, ...], Use] = {}
    for use in uses:
        key = use.component, use.module, use.line
        known = found.get(key)
        found[key] = replace(use, bytes=use.bytes + known.bytes) if known else use
    return tuple(sorted(found.values(), key=_place))


def added(pairs: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Return the sum of the bytes of each name, without those of no name."""
    sums: dict[str, int] = {}
    for name, size in pairs:
        if name is not None:
            sums[name] = sums.get(name, 0) + size
    return sums


def exceeds(before: int, after: int, tolerance: float) -> bool:
    """Return whether `after` is more than a share `tolerance` above `before`."""
    return after > before * (1 + tolerance)


def peak_values(memory: PeakMemory) -> dict[str, Any]:
    """Return the JSON object of a peak, without what is unknown."""
    values = {
        "peak_allocated": memory.peak_allocated,
        "peak_reserved": memory.peak_reserved,
        "leaked": memory.leaked,
    }
    known: dict[str, Any] = {name: size for name, size in values.items() if size is not None}
    return known | ({"uses": [_use_values(use) for use in memory.uses]} if memory.uses else {})


def peak_of(values: Any) -> PeakMemory:
    """Return the peak of a JSON object. Raises ValueError if it is none."""
    memory = convert(values, PeakMemory)
    sizes = (memory.peak_allocated, memory.peak_reserved, *(use.bytes for use in memory.uses))
    if any(size is not None and size < 0 for size in sizes):
        raise ValueError("a size is negative")
    return memory


def _use_values(use: Use) -> dict[str, Any]:
    values: dict[str, Any] = {"component": use.component, "bytes": use.bytes}
    if use.module is not None:
        values["module"] = use.module
    if use.line is not None:
        line = use.line
        fields = {"file": line.file, "line": line.line, "function": line.function}
        values["line"] = fields | ({"code": line.code} if line.code else {})
    return values


def _of_module(use: Use) -> Use | None:
    return replace(use, bytes=0, line=None) if use.module is not None else None


def _of_line(use: Use) -> Use | None:
    return replace(use, bytes=0) if use.line is not None else None


def _changes(
    before: PeakMemory, after: PeakMemory, part_of: Callable[[Use], Use | None]
) -> tuple[Change, ...]:
    """Return the parts that differ. `part_of` returns the part of a use, None without one."""
    sums: dict[tuple[Any, ...], tuple[int, int]] = {}
    parts: dict[tuple[Any, ...], Use] = {}
    for place, memory in enumerate((before, after)):
        for use in memory.uses:
            part = part_of(use)
            if part is not None:
                key = part.component, part.module, part.line and part.line.key
                first, second = sums.get(key, (0, 0))
                sums[key] = (first, second + use.bytes) if place else (first + use.bytes, second)
                parts[key] = part
    return _sorted(
        Change(first, second, parts[key].component, parts[key].module, parts[key].line)
        for key, (first, second) in sums.items()
        if first != second
    )


def _edited(changes: Iterable[Change]) -> Iterator[Change]:
    """Join lines that are gone with the new ones of the same component, module and function.

    They are the same lines with another text if there are as many of them.
    """
    groups: dict[tuple[Any, ...], list[Change]] = {}
    for change in changes:
        line = change.line or SourceLine("")
        groups.setdefault((change.component, change.module, *line.key[:2]), []).append(change)
    for group in groups.values():
        gone = sorted((each for each in group if not each.after), key=_place)
        new = sorted((each for each in group if not each.before), key=_place)
        if len(gone) != len(new):
            yield from group
            continue
        yield from (each for each in group if each.before and each.after)
        pairs = (replace(late, before=early.before) for early, late in zip(gone, new, strict=True))
        yield from (each for each in pairs if each.bytes)


def _sorted(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: (-change.bytes, _place(change))))


def _place(part: Use | Change) -> tuple[Any, ...]:
    """Return a key that sorts by component, module and line."""
    line = part.line or SourceLine("")
    return (
        _order(part.component or ""),
        part.module is None,
        part.module or "",
        part.line is None,
        line.file,
        line.line or 0,
        line.function,
    )


def _order(component: str) -> tuple[int, str]:
    known: Mapping[str, int] = {name: index for index, name in enumerate(COMPONENT_ORDER)}
    return known.get(component, len(COMPONENT_ORDER)), component
