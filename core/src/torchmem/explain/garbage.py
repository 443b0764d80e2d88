"""Garbage: tensors in reference cycles that Python's collector had not reached.

Reference counts do not free objects that refer to each other, and the collector starts by the
number of objects, not by their bytes. Garbage is therefore no leak: a full collection frees it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.explain.call_stack import Frame, public_place

MAX_TYPES = 5
"""The number of types in a report."""


@dataclass(frozen=True, slots=True)
class GarbageType:
    """A type whose objects kept tensors: its name, and the number of these objects."""

    name: str
    count: int
    is_exception: bool = False


@dataclass(frozen=True, slots=True)
class Garbage:
    """What a full collection has freed on one device after an uncaught OutOfMemoryError.

    Attributes:
        bytes: the bytes that came back to the allocator.
        types: the types whose objects kept the tensors, that with the most bytes first; empty if
            they are not known.
        line: the line that had allocated most of it, if stacks were recorded.
        is_collector_off: whether the script had switched the collector off.
    """

    bytes: int
    types: tuple[GarbageType, ...] = ()
    line: Frame | None = None
    is_collector_off: bool = False

    @property
    def origin(self) -> str:
        """The types and the line as the end of a sentence, such as " (28 × Node)"."""
        names = ", ".join(f"{kind.count:,} × {kind.name}" for kind in self.types)
        types = f" ({names})" if names else ""
        return (
            f"{types}, allocated at {' in '.join(public_place(self.line))}" if self.line else types
        )
