"""Results of runs in a JSON file, by name: of programs, of test suites."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def load(path: Path, kind: type[T]) -> dict[str, T]:
    """Return the results in a file by their names; nothing if it does not exist."""
    if not path.exists():
        return {}
    return {each["name"]: kind(**each) for each in json.loads(path.read_text())}


def save(path: Path, results: Mapping[str, DataclassInstance], names: Iterable[str]) -> None:
    """Write the results with these names, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [asdict(results[name]) for name in names if name in results]
    path.write_text(json.dumps(ordered, indent=1) + "\n")
