"""The result of one check: what was found, whether it is a problem, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from torchmem.host.procfs import PROC
from torchmem.sample.run_directory import run_directory

Status = Literal["ok", "note", "problem"]
Values: TypeAlias = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Labels and values of each series of a page of metrics, by name."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    `status`: "note" is information and not a problem, such as a machine without a GPU.
    """

    subject: str
    status: Status
    found: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What is checked: the environment, /proc, the run directory, and the servers.

    `prometheus` is None if it is not checked.
    """

    environment: Mapping[str, str]
    exporter: str
    prometheus: str | None = None
    run_dir: Path | None = None
    proc: Path = field(default=PROC)

    @property
    def directory(self) -> Path:
        """The run directory that processes with this environment use."""
        return self.run_dir or run_directory(self.environment)
