"""What a subject finds: figures, written one by one, so that a subject that is ended keeps some."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Unit = Literal["bytes", "seconds", "ratio", "share", "count", "text", "°C", "W"]

SECONDS = "REAL_GPU_SECONDS"
"""Environment variable of a subject: the seconds that it has."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured, or that could not be.

    Attributes:
        name: unique within a subject.
        value: None if it could not be measured.
        beside: what it is compared with, such as the same value by `nvidia-smi`.
        right: whether the two agree; None if nothing is asserted.
        note: why it could not be measured, or how far the two may be apart.
    """

    name: str
    value: float | str | None
    unit: Unit = "count"
    beside: float | str | None = None
    right: bool | None = None
    note: str = ""


class Figures:
    """A file that figures are added to.

    `is_phantom`: whether the GPU is a phantom, which computes nothing and takes no time.
    `seconds_left`: until the subject is ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_phantom = "PHANTOM_MEMORY" in os.environ
        self._deadline = time.monotonic() + float(os.environ.get(SECONDS, "inf"))

    @property
    def seconds_left(self) -> float:
        """Seconds until the subject is ended."""
        return self._deadline - time.monotonic()

    def add(  # noqa: PLR0913 - each says something else
        self,
        name: str,
        value: float | str,
        unit: Unit = "count",
        beside: float | str | None = None,
        *,
        right: bool | None = None,
        note: str = "",
    ) -> None:
        """Add what was measured."""
        self._write(Figure(name, value, unit, beside, right, note))

    def close(  # noqa: PLR0913 - each says something else
        self,
        name: str,
        value: float | None,
        beside: float | None,
        unit: Unit = "bytes",
        *,
        relative: float = 0.0,
        absolute: float = 0.0,
    ) -> None:
        """Add two values that have to agree within a share of the second, or within `absolute`.

        A value that is missing does not agree with any.
        """
        is_known = value is not None and beside is not None
        off = abs(value - beside) if value is not None and beside is not None else 0.0
        allowed = max(relative * abs(beside or 0.0), absolute)
        self._write(Figure(name, value, unit, beside, is_known and off <= allowed))

    def missing(self, name: str, reason: str) -> None:
        """Add what cannot be measured here, with the reason."""
        self._write(Figure(name, None, note=reason))

    def _write(self, figure: Figure) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(figure)) + "\n")


def read(path: Path) -> list[Figure]:
    """Return the figures of a file; of one that does not exist, none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Figure(**json.loads(line)) for line in lines if line.endswith("\n")]
