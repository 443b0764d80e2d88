"""What is known of each test suite, and where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments import results_file
from experiments.programs.environment import ROOT
from experiments.suites.cpython import CPYTHON
from experiments.suites.table import SUITES, Suite

ALL: Sequence[Suite] = (*SUITES, CPYTHON)
PUBLISHED = Path(__file__).with_name("results.json")


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a suite.

    Attributes:
        versions: of Python, of PyTorch and of its packages.
        reason: why it did not run; "" if it ran.
        outcomes: numbers of tests by outcome, by way.
        changed, unstable: tests, each with its outcomes.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)


def state(agent: str) -> Path:
    """Return the file with the results below an agent; "" for none."""
    return ROOT / "build" / "suites" / f"{agent or 'results'}.json"


def load(path: Path) -> dict[str, Result]:
    """Return what is kept in a file, by name; nothing if it does not exist."""
    return results_file.load(path, Result)


def save(path: Path, results: Mapping[str, Result]) -> None:
    """Keep results in a file, in the order of the table."""
    results_file.save(path, results, (each.name for each in ALL))


def published() -> Sequence[Result]:
    """Return the results for the documentation."""
    return [*load(PUBLISHED).values()]
