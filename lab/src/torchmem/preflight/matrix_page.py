"""The page and the JSON document of a matrix, described in docs/preflight.md."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import format_seconds
from torchmem.output.terminal import counted
from torchmem.preflight.document import dump_document, result_values
from torchmem.preflight.judged_run import all_fit
from torchmem.preflight.matrix import (
    Axis,
    CellResult,
    Matrix,
    MatrixResult,
    largest_values,
    number_axis,
)
from torchmem.preflight.pages import (
    TABLE_COLUMNS,
    growth_first,
    table_figures,
    table_page,
    table_word,
)
from torchmem.preflight.report import PHANTOM_NOTE
from torchmem.preflight.verdict import phantom_name
from torchmem.sample.untrusted import sanitize_text


def page(result: MatrixResult) -> str:
    """Return the table for a terminal."""
    head = [
        f"  {axis.name}" if not index else axis.name for index, axis in enumerate(_axes(result))
    ]
    rows = [(*head, *TABLE_COLUMNS), *map(_row, result.cells)]
    return table_page(_title(result.matrix), _runs(result), rows, sentence(result))


def sentence(result: MatrixResult) -> str:
    """Return the conclusion."""
    number = len(result.cells)
    fitting = sum(cell.fits is True for cell in result.cells)
    unknown = sum(cell.fits is None for cell in result.cells)
    count = f"All {number:,}" if fitting == number else f"{fitting:,} of {number:,}"
    verb = "fits" if fitting == 1 else "fit"
    grows = next(filter(None, (growth_first(cell.result) for cell in result.cells)), "")
    rest = f"{_unknown(unknown)}{_largest(result)}{_fullest(result)}"
    return f"{grows}{count} {verb}.{rest}"


def document(result: MatrixResult) -> str:
    """Return one line of JSON."""
    values = {
        "verdict": {"fits": all_fit(result.cells), "sentence": sentence(result)},
        "axes": {axis.name: list(axis.values) for axis in _axes(result)},
        "cells": [_cell_values(cell, result.matrix) for cell in result.cells],
        "seconds": result.seconds,
        "notes": [PHANTOM_NOTE],
    }
    plan = replace(result.matrix.cells[0].plan, command=result.matrix.command)
    return dump_document("matrix", plan, values)


def _axes(result: MatrixResult) -> tuple[Axis, ...]:
    return result.matrix.axes


def _title(matrix: Matrix) -> str:
    gpus = dict.fromkeys(cell.plan.gpu for cell in matrix.cells)
    first = next(iter(gpus))
    size = format_size(first.memory_bytes)
    where = f"a {phantom_name(first)} ({size})" if len(gpus) == 1 else f"{len(gpus)} phantom GPUs"
    combinations = counted(len(matrix.cells), "combination")
    command = sanitize_text(shlex.join(matrix.command))
    return f"Preflight on {where}, {combinations}: {command}"


def _runs(result: MatrixResult) -> str:
    steps = counted(result.matrix.cells[0].plan.steps, "optimizer step")
    runs = counted(len(result.cells), "run")
    return (
        f"Each run is stopped after {steps}. It took {format_seconds(result.seconds)} in all, with "
        f"{runs} of the script."
    )


def _row(cell: CellResult) -> tuple[str, ...]:
    first, *others = cell.cell.values
    word = table_word(cell.fits, cell.result)
    return f"  {first}", *others, *table_figures(cell.result, word)


def _largest(result: MatrixResult) -> str:
    """Return the largest number of an axis that fits, for each combination of the others."""
    found, index = largest_values(result), number_axis(_axes(result))
    if not found or index is None or not any(found.values()):
        return ""
    name = _axes(result)[index].name
    parts = ", ".join(
        f"{best if best is not None else 'none'}{_with(others)}" for others, best in found.items()
    )
    return f" The largest {name} that fits: {parts}."


def _fullest(result: MatrixResult) -> str:
    """Return which combination leaves least, if all fit."""
    if not all(cell.fits for cell in result.cells):
        return ""
    fullest = min(result.cells, key=lambda cell: cell.result.fullest_device.headroom)
    headroom = format_size(fullest.result.fullest_device.headroom)
    return f" The fullest is {result.matrix.label(fullest.cell)}, with {headroom} of headroom."


def _unknown(number: int) -> str:
    if not number:
        return ""
    has, its = ("has", "its") if number == 1 else ("have", "their")
    return f" {number:,} {has} no verdict; {its} output is shown above."


def _with(others: tuple[str, ...]) -> str:
    return f" with {' '.join(others)}" if others else ""


def _cell_values(cell: CellResult, matrix: Matrix) -> dict[str, Any]:
    plan = cell.cell.plan
    names = (axis.name for axis in matrix.axes)
    return {
        "values": dict(zip(names, cell.cell.values, strict=True)),
        "command": list(plan.command),
        "environment": dict(plan.environment),
        "gpu_model": asdict(plan.gpu),
        "alloc_conf": plan.alloc_conf,
        "placement": asdict(plan.placement) if plan.placement else None,
        "fits": cell.fits,
        "error": str(cell.error) if cell.error else None,
        "outcome": result_values(cell.result),
    }
