"""What is known of each program, and where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments import results_file
from experiments.programs.environment import ROOT
from experiments.programs.table import PROGRAMS

STATE = ROOT / "build" / "programs" / "results.json"
EQUAL = "equal"
PUBLISHED = Path(__file__).with_name("results.json")


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a program.

    Attributes:
        versions: of PyTorch and of its packages.
        reason: why it was not installed or did not run; "" if it ran.
        code: its exit code.
        differs: by way, what differs from the plain runs.
        steps: what the program says of the steps of each rank.
        ranks: what torchmem says of each process, by way.
        cpu_seconds: CPU time of the run, by way.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    code: int | None = None
    differs: dict[str, list[str]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    ranks: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def wrong_steps(self) -> list[str]:
        """The ways in which steps were counted wrongly; absent steps are not wrong."""
        return [way for way in self.ranks if not _are_right(self._counted(way), self.steps)]

    @property
    def summary(self) -> str:
        """What the runs show, in a few words."""
        if self.reason:
            return self.reason
        found = [f"{way}: {'; '.join(what)}" for way, what in self.differs.items()]
        found += [f"{way}: steps {self.ranks[way]}" for way in self.wrong_steps]
        return "; ".join(found) or EQUAL

    def _counted(self, way: str) -> list[int]:
        return [n for each in self.ranks[way] if isinstance(n := each["steps"], int)]


def _are_right(counted: Sequence[int], true: Sequence[int]) -> bool:
    left = list(true)
    for steps in (each for each in counted if each):
        if steps not in left:
            return False
        left.remove(steps)
    return True


def load(path: Path) -> dict[str, Result]:
    """Return what is kept in a file, by name; nothing if it does not exist."""
    return results_file.load(path, Result)


def save(path: Path, results: Mapping[str, Result]) -> None:
    """Keep results in a file, in the order of the table."""
    results_file.save(path, results, (each.name for each in PROGRAMS))


def published() -> Sequence[Result]:
    """Return the results for the documentation."""
    return [*load(PUBLISHED).values()]
