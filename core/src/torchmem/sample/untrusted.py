"""Read files and JSON that any user may have written.

Files must be regular files, not links, and bounded in size. JSON is bounded, its text is made
printable, and it is converted strictly to dataclasses.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_ITEMS = 64  # of any list or mapping: devices, labels, settings, buckets
MAX_TEXT = 200  # bytes of any string in UTF-8
MAX_NUMBER = 1 << 63
MAX_DEPTH = 64  # of lists and objects in each other
MAX_CONTAINERS = 1 << 20  # lists and objects of a document: a "[]" takes 3 bytes, and then 64
MAX_COMMAS = 1 << 22
_LONGEST_NUMBER = 20  # characters of an integer: more would be above MAX_NUMBER
_TOO_DEEP = "is nested too deeply"

T = TypeVar("T")

FileProblem = Literal[
    "not_regular",
    "unreadable",
    "no_descriptors",  # the reader itself has none left: the file may be in order
    "foreign_owner",
    "too_large",
    "unsafe_directory",
]

# O_NONBLOCK: opening a FIFO would otherwise wait for a writer (fifo(7)).
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_IRREGULAR = {errno.ELOOP, errno.ENXIO}  # open() met a link (O_NOFOLLOW), or a socket


class UntrustedFileError(Exception):
    """A file or directory that cannot be used; the text completes a sentence about its name."""

    def __init__(self, problem: FileProblem, text: str) -> None:
        super().__init__(text)
        self.problem: FileProblem = problem


@contextmanager
def open_untrusted(
    path: Path | str, max_bytes: int, owner: int | None = None, *, directory: int | None = None
) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Open a file and yield it with its `fstat` result.

    A relative `path` starts at the directory with the file descriptor `directory`, if one is given.

    Raises:
        FileNotFoundError: the file does not exist.
        UntrustedFileError: it is not a readable regular file of at most `max_bytes`, or it does
            not belong to the user ID `owner`, if one is given.
    """
    with os.fdopen(_open_regular(path, directory), "rb") as file:
        status = os.fstat(file.fileno())
        if owner not in {None, status.st_uid}:
            raise UntrustedFileError("foreign_owner", "belongs to another user")
        if status.st_size > max_bytes:
            raise UntrustedFileError("too_large", f"is larger than {max_bytes} bytes")
        yield file, status


def read_untrusted(
    path: Path | str, max_bytes: int, owner: int | None = None, *, directory: int | None = None
) -> tuple[bytes, os.stat_result]:
    """Read a whole file; raise the errors of `open_untrusted`."""
    with open_untrusted(path, max_bytes, owner, directory=directory) as (file, status):
        try:
            # It may have grown since fstat.
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise _unreadable(error) from error
    if len(data) > max_bytes:
        raise UntrustedFileError("too_large", f"is larger than {max_bytes} bytes")
    return data, status


@contextmanager
def open_untrusted_directory(
    path: Path | str, owner: int | None = None, *, directory: int | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """Open a directory to which only its owner can write; yield its descriptor and `fstat` result.

    A relative `path` starts at the directory with the file descriptor `directory`, if one is given.

    Raises:
        FileNotFoundError: the directory does not exist.
        UntrustedFileError: it is not a readable directory, other users may write to it, or it does
            not belong to the user ID `owner`, if one is given.
    """
    descriptor = _open(path, directory, _READ_FLAGS | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        if owner not in {None, status.st_uid}:
            raise UntrustedFileError("foreign_owner", "belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedFileError("unsafe_directory", "can be written by other users")
        yield descriptor, status
    finally:
        os.close(descriptor)


def _open_regular(path: Path | str, directory: int | None) -> int:
    descriptor = _open(path, directory)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    found = "is a directory" if stat.S_ISDIR(mode) else "is not a regular file"
    raise UntrustedFileError("not_regular", found)


def _open(path: Path | str, directory: int | None, flags: int = _READ_FLAGS) -> int:
    try:
        return os.open(path, flags, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        if flags & os.O_DIRECTORY and error.errno in {*_IRREGULAR, errno.ENOTDIR}:
            raise UntrustedFileError("unsafe_directory", "is not a directory") from error
        if error.errno in _IRREGULAR:
            raise UntrustedFileError("not_regular", "is not a regular file") from error
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> UntrustedFileError:
    problem: FileProblem = "no_descriptors" if lacks_descriptors(error) else "unreadable"
    return UntrustedFileError(problem, f"cannot be read ({error.strerror})")


def lacks_descriptors(error: OSError) -> bool:
    """Return whether the process, or the machine, has no file descriptor left."""
    return error.errno in {errno.EMFILE, errno.ENFILE}


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of control characters and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def printable_json(value: Any) -> Any:
    """Return a JSON value with printable text."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): printable_json(item) for key, item in value.items()}
    return [printable_json(item) for item in value] if isinstance(value, list) else value


def sanitize_text(text: str) -> str:
    """Return the first MAX_TEXT bytes of `text` in UTF-8, made printable."""
    text = printable(text[:MAX_TEXT])
    return text if text.isascii() else text.encode()[:MAX_TEXT].decode(errors="ignore")


def sanitize_json(value: Any, *, keeps_numbers: bool = False) -> Any:
    """Return a JSON value with sanitized text; raise ValueError if it exceeds a bound.

    With `keeps_numbers`, a number out of bounds becomes an integer out of bounds.
    """
    if isinstance(value, str):
        return sanitize_text(value)
    if isinstance(value, (int, float)):
        if 0 <= value <= MAX_NUMBER:
            return value
        if not keeps_numbers:
            raise ValueError("a number is out of bounds")
        return -1 if value < 0 else 2 * MAX_NUMBER
    if isinstance(value, (dict, list)) and len(value) > MAX_ITEMS:
        raise ValueError("a list or mapping is too long")
    if isinstance(value, dict):
        return {
            sanitize_text(key): sanitize_json(item, keeps_numbers=keeps_numbers)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [sanitize_json(item, keeps_numbers=keeps_numbers) for item in value]
    return value


def strict_json(data: bytes) -> Any:
    """Return a JSON value of bounded memory, depth and numbers, without NaN and infinity.

    So what reads the value meets neither RecursionError nor OverflowError. Raises ValueError, whose
    text completes a sentence that begins with the document.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS or data.count(b",") > MAX_COMMAS:
        raise ValueError("has too many values")
    try:
        value = json.loads(
            data, parse_constant=_refuse_number, parse_int=_integer, parse_float=_float
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError("is not JSON, or is cut off") from None
    _check_depth(value, MAX_DEPTH)
    return value


def _refuse_number(text: str) -> Any:
    raise ValueError(f"has the number {text[:_LONGEST_NUMBER]}, which is out of bounds")


def _integer(text: str) -> int:
    return int(text) if len(text) <= _LONGEST_NUMBER else int(_refuse_number(text))


def _float(text: str) -> float:
    value = float(text)
    return value if abs(value) <= 2 * MAX_NUMBER else float(_refuse_number(text))


def _check_depth(value: Any, left: int) -> None:
    """Raise ValueError if containers are nested more deeply than `left`."""
    if isinstance(value, (dict, list)):
        if not left:
            raise ValueError(_TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def convert(value: Any, kind: type[T]) -> T:
    """Return a JSON object as an instance of the dataclass `kind`.

    Fields of the object that `kind` does not have are ignored.

    Raises:
        ValueError: a field is missing or has a wrong type.
    """
    converted: T = _convert(value, kind, kind.__name__)
    return converted


def _convert(value: Any, kind: Any, name: str) -> Any:  # noqa: PLR0911 - one case per type
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(value, kind, name)
    if origin in {Union, types.UnionType}:
        (known,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _convert(value, known, name)
    if origin is tuple and isinstance(value, list):
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(map(_convert, value, kinds, (name,) * len(value)))
    if origin is list and isinstance(value, list):
        return [_convert(item, arguments[0], name) for item in value]
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


_type_hints = cache(get_type_hints)  # which takes longer than the conversion


def _object(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004 - a bad value
    hints, arguments = _type_hints(kind), {}
    for field in fields(kind):
        if field.name in value:
            arguments[field.name] = _convert(value[field.name], hints[field.name], field.name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{field.name} is missing")
    return kind(**arguments)
