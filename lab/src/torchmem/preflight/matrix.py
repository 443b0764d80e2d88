"""A matrix of runs: the script under each combination of values.

`--matrix batch=8,16 precision=bf16,fp32` has two axes and four cells.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from torchmem.preflight.judged_run import JudgedRun
from torchmem.preflight.plan import MAX_RUNS, VARIABLE, RunPlan
from torchmem.preflight.runner import Runner
from torchmem.preflight.script_options import option_of, with_value
from torchmem.sample.errors import UsageError

OWN_FLAGS = ("gpu_model", "alloc_conf", "world_size", "rank")
"""Names that set a flag of the preflight itself, unless the command has them in braces."""
NUMBERS = frozenset({"world_size", "rank"})
_NAME = re.compile(r"-{0,2}[A-Za-z_][\w.\-]*")
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_SET_BY_PREFLIGHT = frozenset(
    {
        VARIABLE,
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "LD_PRELOAD",
        "TORCHMEM_RUN",
        "TORCHMEM_RUN_DIR",
        "TORCHMEM_NOTE_ON_OOM",
    }
)
"""Variables whose value the script would not see."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One name and its values, as texts."""

    name: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Parse an axis such as "batch=8,16,32". Raises UsageError.

        Values are separated as in CSV: quotes keep a comma.
        """
        name, equals, values = text.partition("=")
        if not (equals and values and _NAME.fullmatch(name)):
            raise UsageError(
                f"--matrix {text[:60]!r} is not a name with values such as batch=8,16,32; put -- "
                "before the command."
            )
        if name in _SET_BY_PREFLIGHT:
            raise UsageError(f"--matrix cannot vary {name}: a preflight sets it itself.")
        row = next(csv.reader([values]))
        return cls(name, tuple(dict.fromkeys(value.strip() for value in row)))


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: a value of each axis, and the run."""

    values: tuple[str, ...]
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class Matrix:
    """All combinations, the values of the last axis changing fastest.

    command: as given, without the values.
    """

    command: tuple[str, ...]
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]

    def label(self, cell: Cell) -> str:
        """Return a name of the cell for messages, such as "batch=8 precision=bf16"."""
        pairs = zip(self.axes, cell.values, strict=True)
        return " ".join(f"{axis.name}={value}" for axis, value in pairs)


@dataclass(frozen=True, slots=True)
class CellResult(JudgedRun):
    """The run of one cell."""

    cell: Cell


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """The runs of all cells, in the order of the matrix. seconds: wall time in all."""

    matrix: Matrix
    cells: tuple[CellResult, ...]
    seconds: float


def run_all(matrix: Matrix, runner: Runner) -> MatrixResult:
    """Run each cell. A cell without a verdict does not end the others."""
    results = []
    for cell in matrix.cells:
        label = matrix.label(cell)
        results.append(CellResult(runner.run_captured(cell.plan, f"phantom, {label}"), cell))
        if results[-1].error:
            print(f"torchmem: no verdict for {label}.", file=sys.stderr)
    return MatrixResult(matrix, tuple(results), runner.elapsed_seconds())


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[str, ...]]:
    """Return all combinations of values."""
    return product(*(axis.values for axis in axes))


def check_axes(axes: Sequence[Axis], arguments: argparse.Namespace) -> None:
    """Raise UsageError if a name is given twice, or if there are too many combinations."""
    names = [axis.name for axis in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"--matrix has {twice} twice: give it once, with all its values.")
    for name in names:
        if _is_own(name, arguments.command) and getattr(arguments, name) is not None:
            raise UsageError(f"--matrix varies {name}: remove --{name.replace('_', '-')}.")
    number = prod(len(axis.values) for axis in axes)
    if number > MAX_RUNS:
        raise UsageError(
            f"--matrix has {number:,} combinations: give fewer values, for at most {MAX_RUNS}."
        )


def applied(
    axes: Sequence[Axis], values: Sequence[str], command: Sequence[str]
) -> tuple[dict[str, str | int], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return what one combination sets: the preflight's flags, variables, and the command.

    A name is the first of these: {name} in the command, a flag in `OWN_FLAGS`, an environment
    variable if it is in upper case, an option of the script. Raises UsageError.
    """
    own: dict[str, str | int] = {}
    environment: list[tuple[str, str]] = []
    words = tuple(command)
    for axis, value in zip(axes, values, strict=True):
        option = option_of(command, axis.name)
        if _is_own(axis.name, command):
            own[axis.name] = _number(axis.name, value) if axis.name in NUMBERS else value
        elif not option.startswith("{") and _VARIABLE_NAME.fullmatch(axis.name):
            environment.append((axis.name, value))
        else:
            words = with_value(words, option, value)
    return own, tuple(environment), words


def _is_own(name: str, command: Sequence[str]) -> bool:
    return name in OWN_FLAGS and not option_of(command, name).startswith("{")


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UsageError(f"--matrix {name} {value[:60]!r} is not a number.")
    return int(value)


def largest_values(result: MatrixResult) -> Mapping[tuple[str, ...], str | None] | None:
    """Return, for each combination of the other axes, the largest number that fits, or None.

    None without an axis of at least two numbers. That axis is the first one, see `number_axis`.
    Axes with a single value are left out of the combinations.
    """
    index = number_axis(result.matrix.axes)
    if index is None:
        return None
    axes = result.matrix.axes
    found: dict[tuple[str, ...], str | None] = {}
    for each in result.cells:
        values = each.cell.values
        numbered = enumerate(values)
        others = tuple(x for at, x in numbered if at != index and len(axes[at].values) > 1)
        best = found.setdefault(others, None)
        if each.fits and (best is None or int(values[index]) > int(best)):
            found[others] = values[index]
    return found


def number_axis(axes: Sequence[Axis]) -> int | None:
    """Return the index of the first axis of sizes: at least two values that are all numbers."""
    for index, axis in enumerate(axes):
        is_of_numbers = len(axis.values) > 1 and all(value.isdecimal() for value in axis.values)
        if is_of_numbers and axis.name not in NUMBERS:
            return index
    return None
