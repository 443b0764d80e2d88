"""Valid JSON of a server with one value that no honest server sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

DEEP = b"[" * 100_000
VALUES = {
    "400 digits": b"1" * 400,
    "negative": b"-" + b"1" * 400,
    "exponent": b"1e400",
    "large": b"1e300",
    "deep": b"[" * 200 + b"]" * 200,
    "surrogate": b'"\\ud800"',
    "control": b'"\\u001b[2J\\u0000"',
    "list": b"[[]]",
    "object": b'{"": {}}',
    "text": b'"x"',
    "null": b"null",
}
_MARK = "the value"


def variants(document: bytes, values: dict[str, bytes] = VALUES) -> Iterator[bytes]:
    """Yield the document once for each of its values and each of `values` in its place."""
    for path in _paths(json.loads(document)):
        changed = json.loads(document)
        _set(changed, path, _MARK)
        around = json.dumps(changed).encode().split(json.dumps(_MARK).encode())
        for value in values.values():
            yield value.join(around)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:2]
    for key, item in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(item))


def _set(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value
