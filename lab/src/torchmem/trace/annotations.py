"""What a program wrote beside the trace: the ranges of torch.profiler.record_function.

PyTorch writes their starts and ends as `external_annotations`, once for each device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchmem.trace.checked_values import LIMIT, checked_dict, checked_integer, checked_list
from torchmem.trace.stacks import UNKNOWN_TIME, StackTable

MAX_ANNOTATIONS = 1_000_000
"""Of more, the newest count."""
MAX_DEPTH = 64
MAX_SHOWN = 4
"""Ranges of a path, the innermost ones."""
_START, _END = "START", "END"


@dataclass(frozen=True, slots=True)
class Annotation:
    """The start or the end of a range; `name` is a number of the snapshot's texts.

    `time` is in microseconds of the trace's clock.
    """

    device: int
    time: int
    is_start: bool
    name: int


def checked_annotations(value: object, table: StackTable) -> Iterator[Annotation]:
    """Yield the annotations of a snapshot; those of other kinds are left out.

    Raises:
        InvalidSnapshotError: they do not have the form that PyTorch writes.
    """
    entries = [] if value is None else checked_list(value, "external_annotations")
    for number, element in enumerate(entries[-MAX_ANNOTATIONS:]):
        where = f"annotation {number}"
        entry: dict[Any, Any] = checked_dict(element, where)
        name, stage = table.text(entry.get("name")), entry.get("stage")
        if name >= 0 and stage in (_START, _END):
            yield Annotation(
                checked_integer(entry, "device", where),
                checked_integer(entry, "time_us", where, limit=LIMIT),
                stage == _START,
                name,
            )


def open_ranges(
    annotations: Sequence[Annotation], times: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """Yield for each event the names of the ranges that are open at its time, the outermost first.

    `annotations` are those of its device. A range that ends without a start is passed over.
    """
    waiting = iter(sorted(annotations, key=lambda each: each.time))
    following = next(waiting, None)
    path: tuple[int, ...] = ()
    for time in times:
        while following is not None and time != UNKNOWN_TIME and following.time <= time:
            path = _after(path, following)
            following = next(waiting, None)
        yield path


def _after(path: tuple[int, ...], annotation: Annotation) -> tuple[int, ...]:
    if annotation.is_start:
        return (*path[-MAX_DEPTH:], annotation.name)
    for place in reversed(range(len(path))):
        if path[place] == annotation.name:
            return path[:place] + path[place + 1 :]
    return path
