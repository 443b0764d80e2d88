"""Remove values that cannot be true from a dataclass: one impossible number costs that number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, get_args

from torchmem.sample.untrusted import MAX_NUMBER

T = TypeVar("T")

FaultReason = Literal[
    "negative",
    "too_large",  # or not finite
    "contradictory",  # to another value
]
FAULT_REASONS: tuple[FaultReason, ...] = get_args(FaultReason)

_NUMBERS = (int, float)
_REQUIRED = object()
_IMPOSSIBLE = object()


@dataclass(frozen=True, slots=True)
class Fault:
    """What was left out: the name of the field, and why."""

    field: str
    reason: FaultReason


Contradictions = Callable[[Any], Mapping[str, Any] | None]
"""Returns replacements for contradictory fields of an object, or None to drop the object."""


def without_impossible(
    value: T, contradictions: Contradictions
) -> tuple[T | None, tuple[Fault, ...]]:
    """Return a dataclass without values that cannot be true, and what was left out.

    Optional fields, entries of mappings, and the objects in a list called `devices` are left out
    alone. Any other impossible number also removes the object that needs it; None if that is the
    dataclass itself.
    """
    faults: list[Fault] = []
    found = _Walk(contradictions, faults).object(type(value).__name__, value)
    return (None if found is _IMPOSSIBLE else found), tuple(faults)


class _Walk:
    def __init__(self, contradictions: Contradictions, faults: list[Fault]) -> None:
        self._contradictions = contradictions
        self._faults = faults

    def object(self, name: str, value: Any) -> Any:
        """Return an object without impossible values."""
        changes = {}
        kind: type = type(value)
        for field, default in _defaults(kind):
            old = getattr(value, field)
            if not old or (type(old) in _NUMBERS and 0 < old <= MAX_NUMBER):  # unknown, 0, or empty
                continue
            new = self._value(field, old)
            if new is _IMPOSSIBLE:
                if default is _REQUIRED:
                    return _IMPOSSIBLE
                new = default
            if new is not old:
                changes[field] = new
        return self._consistent(name, replace(value, **changes) if changes else value)

    def _consistent(self, name: str, value: Any) -> Any:
        replaced = self._contradictions(value)
        if replaced is None:
            self._faults.append(Fault(name, "contradictory"))
            return _IMPOSSIBLE
        if not replaced:
            return value
        self._faults += [Fault(field, "contradictory") for field in replaced]
        return replace(value, **replaced)

    def _value(self, name: str, value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is float:
            return value if 0 <= value <= MAX_NUMBER else self._impossible(name, value)
        if value is None or kind is str:
            return value
        if kind is tuple:
            return self._items(name, value)
        if kind is dict:
            if _is_sound(value.values()):  # without a call for each, as most are
                return value
            kept = {key: self._value(name, item) for key, item in value.items()}
            left = {key: item for key, item in kept.items() if item is not _IMPOSSIBLE}
            return value if left == value else left
        return self.object(name, value)

    def _items(self, name: str, values: tuple[Any, ...]) -> Any:
        if name == "devices":
            kept = [self._value(name, value) for value in values]
            left = tuple(item for item in kept if item is not _IMPOSSIBLE)
            return values if left == values else left
        known = [value for value in values if value is not None] if None in values else values
        lowest, highest = min(known, default=0), max(known, default=0)
        if lowest >= 0 and highest <= MAX_NUMBER:
            return values
        return self._impossible(name, min(lowest, 0) or highest)

    def _impossible(self, name: str, value: float) -> Any:
        self._faults.append(Fault(name, "negative" if value < 0 else "too_large"))
        return _IMPOSSIBLE


def _is_sound(values: Collection[Any]) -> bool:
    """Return whether all are possible integers."""
    if not {*map(type, values)} <= {int}:
        return False
    return min(values, default=0) >= 0 and max(values, default=0) <= MAX_NUMBER


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return each field that can hold a number, with its value for unknown."""
    return tuple((field.name, _unknown(field)) for field in fields(kind) if _holds_number(field))


def _holds_number(field: Field[Any]) -> bool:
    kind = str(field.type).removesuffix(" | None")
    return kind not in {"str", "bool", "Ending", "dict[str, str]", "dict[str, bool]"}


def _unknown(field: Field[Any]) -> Any:
    """Return the default, unless that is a number, which would be false."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    is_optional = str(field.type).endswith("| None")  # a column of optional values is not
    if is_optional or is_dataclass(field.default):
        return None if is_optional else field.default
    return _REQUIRED
