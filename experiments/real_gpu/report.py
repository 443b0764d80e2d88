"""The report of a run, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.real_gpu.figures import Figure
from experiments.real_gpu.machine import Machine
from experiments.real_gpu.registry import SUBJECTS, Subject
from experiments.real_gpu.runner import Result

RESULTS = Path(__file__).with_name("results.json")
"""The report of a run on a real GPU; there is none before that."""
MIB = 1 << 20
UNITS = {"bytes": "MiB", "seconds": "ms", "share": "%"}
SCALES = {"bytes": 1 / MIB, "seconds": 1e3, "share": 100.0}
MARKS = {True: "yes", False: "**no**", None: ""}
HEAD = ("| figure | measured | beside | right | phantom |", "|---|---|---|---|---|")


@dataclass(slots=True)
class Report:
    """What a run found: the machine, and the results by the name of their subject.

    real: on the machine's GPU; empty if there is none. phantom: on a phantom of it.
    """

    machine: Machine
    date: str
    real: dict[str, Result] = field(default_factory=dict)
    phantom: dict[str, Result] = field(default_factory=dict)

    @property
    def judged(self) -> dict[str, Result]:
        """The results that decide whether the run passes: the GPU's, else the phantom's."""
        return self.real if self.machine.gpu else self.phantom

    @property
    def bad(self) -> list[str]:
        """The names of subjects that failed or had no time."""
        return [
            name
            for name, result in self.judged.items()
            if result.state in {"failed", "out of time"}
        ]

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` has written."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            Machine(**found["machine"]),
            found["date"],
            *(
                {name: _result(row) for name, row in found[on].items()}
                for on in ("real", "phantom")
            ),
        )


def _result(row: dict[str, Any]) -> Result:
    return Result(**{**row, "figures": [Figure(**figure) for figure in row["figures"]]})


def markdown(report: Report) -> str:
    """Return the page."""
    return "\n".join([*_head(report), *(line for each in SUBJECTS for line in _part(each, report))])


def _head(report: Report) -> Iterator[str]:
    machine = report.machine
    yield "# On a real GPU\n" if machine.gpu else "# On a phantom GPU\n"
    software = f"PyTorch {machine.torch}, CUDA {machine.cuda}, Python {machine.python}"
    if machine.gpu:
        yield f"{machine.gpu}, driver {machine.driver}, {software}; {report.date}."
        yield "*Phantom*: the same on a [phantom GPU](../phantom.md) of that model."
    else:
        yield f"No GPU: all figures are those of a phantom GPU. {software}; {report.date}."
    yield "*Beside*: the same by PyTorch, NVML or nvidia-smi. Measured by `make test-gpu`.\n"
    yield "| subject | outcome | seconds |\n|---|---|---|"
    for subject in SUBJECTS:
        if result := report.judged.get(subject.name):
            why = f": {result.reason}" if result.reason else ""
            yield f"| {subject.title} | {result.state}{why} | {result.seconds:,.0f} |"


def _part(subject: Subject, report: Report) -> Iterator[str]:
    result, other = report.judged.get(subject.name), report.phantom.get(subject.name)
    if result is None or not result.figures:
        return
    yield f"\n## {subject.title}\n"
    yield from HEAD
    there = {figure.name: figure for figure in other.figures} if other else {}
    for figure in result.figures:
        phantom = there.get(figure.name) if report.machine.gpu else None
        yield (
            f"| {figure.name} | {_shown(figure)} | {_value(figure.beside, figure)} | "
            f"{MARKS[figure.right]} | {_shown(phantom) if phantom else ''} |"
        )


def _shown(figure: Figure) -> str:
    value = _value(figure.value, figure)
    return "; ".join(filter(None, [value, figure.note]))


def _value(value: float | str | None, figure: Figure) -> str:
    if value is None or isinstance(value, str):
        return (value or "").replace("|", "\\|").replace("\n", " ")
    scaled = value * SCALES.get(figure.unit, 1.0)
    unit = UNITS.get(figure.unit, "" if figure.unit in {"count", "ratio", "text"} else figure.unit)
    number = f"{scaled:,.0f}" if scaled == int(scaled) else f"{scaled:,.4g}"
    return f"{number} {unit}".strip()
