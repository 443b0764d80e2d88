"""JSON that anybody may have written: bounded in size, its text sanitize_text, strictly converted to our dataclasses.

Opening a file of the run directory, where anybody may have put anything: regular files only, no links, bounded.
"""

from __future__ import annotations

import errno
import os
import stat
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_ITEMS = 64  # of any list or mapping: devices, labels, settings, buckets
MAX_TEXT = 200  # characters of any string
MAX_NUMBER = 1 << 63

T = TypeVar("T")


def sanitize_json(value: Any) -> Any:
    """The same JSON value with its text made harmless; raises ValueError when a bound is broken."""
    if isinstance(value, str):
        return sanitize_text(value)
    if isinstance(value, (int, float)):
        if not 0 <= value <= MAX_NUMBER:
            raise ValueError("a number is out of bounds")
        return value
    if isinstance(value, (dict, list)) and len(value) > MAX_ITEMS:
        raise ValueError("a list or mapping is too long")
    if isinstance(value, dict):
        return {sanitize_text(key): sanitize_json(item) for key, item in value.items()}
    return [sanitize_json(item) for item in value] if isinstance(value, list) else value


def sanitize_text(text: str) -> str:
    """Return the first MAX_TEXT characters of `text`, made printable."""
    return printable(text[:MAX_TEXT])


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of control characters and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


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
        return {
            _convert(key, arguments[0], name): _convert(item, arguments[1], name)
            for key, item in value.items()
        }
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


_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UntrustedFileError(Exception):
    """A file that is not read; its text says why, as the end of a sentence that begins with the file."""


@contextmanager
def open_untrusted(
    path: Path, max_bytes: int, owner: int | None = None
) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """The open file and what fstat says of it.

    Raises FileNotFoundError, and UntrustedFileError for all but a readable regular file of at most `max_bytes`, of
    the user `owner` if one is given.
    """
    with os.fdopen(_descriptor(path), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFileError("is not a regular file")
        if owner not in {None, status.st_uid}:
            raise UntrustedFileError("is another user's")
        if status.st_size > max_bytes:
            raise UntrustedFileError(f"is larger than {max_bytes} bytes")
        yield file, status


def _descriptor(path: Path) -> int:
    try:
        return os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        linked = error.errno in {errno.ELOOP, errno.ENXIO}
        raise UntrustedFileError(
            "is not a regular file" if linked else f"cannot be read ({error.strerror})"
        ) from error


def read_untrusted(
    path: Path, max_bytes: int, owner: int | None = None
) -> tuple[bytes, os.stat_result]:
    """The whole file; raises what `open_untrusted` raises."""
    with open_untrusted(path, max_bytes, owner) as (file, status):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UntrustedFileError(f"is larger than {max_bytes} bytes")
    return data, status
