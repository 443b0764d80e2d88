"""JSON that anybody may have written: bounded in size, its text harmless, strictly converted to our dataclasses."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_ITEMS = 64  # of any list or mapping: devices, labels, settings, buckets
MAX_TEXT = 200  # characters of any string
MAX_NUMBER = 1 << 63

T = TypeVar("T")


def bounded(value: Any) -> Any:
    """The same JSON value with its text made harmless; raises ValueError when a bound is broken."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, (int, float)):
        if not 0 <= value <= MAX_NUMBER:
            raise ValueError("a number is out of bounds")
        return value
    if isinstance(value, (dict, list)) and len(value) > MAX_ITEMS:
        raise ValueError("a list or mapping is too long")
    if isinstance(value, dict):
        return {harmless(key): bounded(item) for key, item in value.items()}
    return [bounded(item) for item in value] if isinstance(value, list) else value


def harmless(text: str) -> str:
    """Text cut to MAX_TEXT characters, with a mark in place of control characters and lone surrogates."""
    text = text[:MAX_TEXT]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def convert(value: Any, kind: type[T]) -> T:
    """A JSON object as an instance of the dataclass `kind`; raises ValueError when a field is missing or wrong."""
    found: T = _convert(value, kind, kind.__name__)
    return found


def _convert(value: Any, kind: Any, name: str) -> Any:  # noqa: PLR0911 - one case for each kind of type
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(value, kind, name)
    if origin in {Union, types.UnionType}:
        (known,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _convert(value, known, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, arguments[0], name) for item in value)
    if origin is dict and isinstance(value, dict):
        return {_convert(key, arguments[0], name): _convert(item, arguments[1], name) for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise ValueError(f"{name} has a wrong value")


def _object(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is no object")  # noqa: TRY004 - a value, not a caller's mistake
    hints, found = get_type_hints(kind), {}
    for field in fields(kind):
        if field.name in value:
            found[field.name] = _convert(value[field.name], hints[field.name], field.name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**found)
