"""Hostile input from valid input: damaged bytes, and documents with values that do not belong."""

from __future__ import annotations

import json
import pickle
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TEXTS = (
    *["", " ", "\0", "\n", "\r\n", '"', "'", "\\", "{}", "[]", "%s%n", "{0}", "$(id)", "`id`"],
    *["../../etc/passwd", "/dev/zero", "-1", "1e999", "nan", "inf", "0x10", "1_0", "true", "null"],
    *["\ud800", "\udfff", "\u202e", "\ufeff", "\x1b[31m", "\x85", "é", "٣", "𝟗", "😀" * 60],
    *["x" * 201, "x" * 5000, "9" * 5000, "gpu-é" * 80, "schema", "__class__", "<script>"],
)
NUMBERS = (
    *[0, 1, -1, 2, 63, 64, 65, 255, 4097, 1 << 22, (1 << 22) + 1, 1 << 31, 1 << 32, 1 << 53],
    *[(1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**30, 0.5, -0.0, 1e-320, 1e18, 1e308],
    *[float("inf"), float("-inf"), float("nan")],
)
UTF8 = "utf-8", "surrogatepass"
EDITS = (1, 1, 1, 1, 2, 3, 4)
"""How many changes an input has; with few, more of it is read before it is refused."""
MAX_PIECE = 64
"""Bytes that one edit removes or repeats."""


@dataclass(frozen=True)
class Documents:
    """Valid documents, made of dicts, lists and scalars, and the function that writes one."""

    trees: Sequence[Any]
    write: Callable[[random.Random, Any], bytes]


def hostile(
    rng: random.Random, valid: Sequence[bytes], words: Sequence[str], documents: Documents | None
) -> bytes:
    """Return one input: changed documents, damaged valid input, known words, or noise."""
    kind = rng.random()
    if documents is not None and kind < 0.65:
        return _document(rng, documents)
    if valid and kind < 0.9:
        return damaged(rng, rng.choice(valid))
    if words and kind < 0.97:
        return soup(rng, words)
    return rng.randbytes(rng.randrange(200))


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Return `content` with a few pieces overwritten, removed, repeated or moved."""
    for _ in range(rng.choice(EDITS)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.randrange(MAX_PIECE))
        piece = content[start:end]
        new = rng.choice(
            (b"", piece * 2, rng.randbytes(rng.randint(1, 8)), _text(rng).encode(*UTF8))
        )
        content = content[:start] + new + content[end:]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.1 else content


def soup(rng: random.Random, words: Sequence[str]) -> bytes:
    """Return known words and punctuation in any order."""
    pieces = [
        rng.choice(words) if rng.random() < 0.6 else rng.choice((*string.punctuation, "\n", " "))
        for _ in range(rng.randrange(24))
    ]
    return "".join(pieces).encode(*UTF8) + (rng.randbytes(4) if rng.random() < 0.2 else b"")


def _document(rng: random.Random, documents: Documents) -> bytes:
    tree = rng.choice(documents.trees)
    for _ in range(rng.choice(EDITS)):
        tree = changed(rng, tree)
    return documents.write(rng, tree)


def changed(rng: random.Random, tree: Any) -> Any:
    """Return `tree` with one change at a random place; what is not changed is shared."""
    if not isinstance(tree, dict | list | tuple) or not tree or rng.random() < 0.15:
        return _other(rng, tree)
    if isinstance(tree, dict):
        return _changed_dict(rng, tree)
    items = list(tree)
    place = rng.randrange(len(items))
    if rng.random() < 0.8:
        items[place] = changed(rng, items[place])
    else:
        items[place : place + 1] = rng.choice(([], [items[place]] * 2, [items[place]] * 70))
    return items if isinstance(tree, list) else tuple(items)


def _changed_dict(rng: random.Random, tree: dict[Any, Any]) -> dict[Any, Any]:
    key = rng.choice(list(tree))
    if rng.random() < 0.8:
        return {**tree, key: changed(rng, tree[key])}
    rest = {name: value for name, value in tree.items() if name != key}
    return rest if rng.random() < 0.5 else {**rest, _text(rng): tree[key]}


def _other(rng: random.Random, value: Any) -> Any:
    """Return a value in place of another one: one of its type, or of any other."""
    if rng.random() < 0.4:
        if isinstance(value, str):
            return rng.choice((value * 2, value[:-1], value + _text(rng), value.upper()))
        if isinstance(value, int | float):
            return rng.choice((value + 1, value * 2, -value, value * 512, float(value)))
    return rng.choice(
        (
            *[None, True, False, [], {}, [value], {"a": value}, [[value] * 3] * 3],
            *[rng.choice(NUMBERS), rng.choice(NUMBERS), _text(rng), _text(rng)],
            *[_nested(rng.choice((10, 50, 200))), list(range(100))],
            {str(number): number for number in range(65)},
        )
    )


def _nested(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = [tree]
    return tree


def _text(rng: random.Random) -> str:
    return rng.choice(TEXTS)


def json_bytes(rng: random.Random, tree: Any) -> bytes:
    """Return a document as JSON, which is YAML too."""
    is_ascii = rng.random() < 0.5
    return json.dumps(tree, ensure_ascii=is_ascii).encode(*UTF8)


def pickle_bytes(rng: random.Random, tree: Any) -> bytes:
    """Return a document as a pickle of any protocol that PyTorch has used."""
    return pickle.dumps(tree, protocol=rng.randint(2, 5))
