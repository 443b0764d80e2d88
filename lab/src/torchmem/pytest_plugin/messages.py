"""What the plugin says: why a test fails, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.compare.baseline import Compared
from torchmem.compare.peak_lines import (
    change_lines,
    headline,
    held_lines,
    kept_lines,
    signed,
    words,
)
from torchmem.compare.peak_memory import PeakMemory
from torchmem.output.terminal import counted
from torchmem.phantom.gpus import CATALOG
from torchmem.pytest_plugin.limits import MemoryLimits
from torchmem.pytest_plugin.measured import Conditions, MeasuredTest

HEAD = "GPU memory"
"""What the message of each failure starts with."""
VALUES = (
    "the test read {} from the phantom GPU, which computes nothing, so that they are zero: check "
    "values in another test, or only if gpu_memory.is_phantom is false."
)
PROCESSES = (
    "the test used no GPU memory in its own process, but started {}, whose memory is not "
    "measured: run that code in the test itself."
)
LEFT = "What was still allocated, by component, module and line:"
NO_MEMORY = "the test used no GPU memory: move its model and its inputs to the GPU."


def limit_failure(measured: MeasuredTest, limits: MemoryLimits) -> str | None:
    """Return why a test exceeds its limits, and what held the memory; None if it does not."""
    for device, memory in measured.devices.items():
        problems = list(limits.problems(memory))
        if problems:
            where = f" on cuda:{device}" if len(measured.devices) > 1 else ""
            head = [f"{HEAD}{where}: {problem}" for problem in problems]
            left = measured.left.get(device) if limits.leaks(memory) else None
            held = held_lines(left, LEFT) if left else ()
            is_peak = len(problems) > limits.leaks(memory)
            lines = [*head, _place(measured.conditions), *held]
            peak = [*held_lines(memory), *kept_lines(memory)] if is_peak else []
            return "\n".join([*lines, *peak])
    return None


def baseline_failure(compared: Compared, conditions: Conditions) -> str:
    """Return why a test fails against the baseline, and what changed."""
    grown = headline(compared.diff) if compared.diff else None
    head = f"{HEAD}: {compared.sentence}" + (f" {grown}." if grown else "")
    changes = change_lines(compared.diff) if compared.diff else ()
    return "\n".join([head, _place(conditions), *changes, *held_lines(compared.entry.memory)])


def remark(measured: MeasuredTest, *, failed: bool) -> str | None:
    """Return what to know about a test's result on these conditions, in one sentence."""
    conditions = measured.conditions
    if failed and conditions.values_read:
        return VALUES.format(counted(conditions.values_read, "value"))
    if measured.fullest is None or not measured.fullest.peak_allocated:
        if conditions.processes:
            return PROCESSES.format(counted(conditions.processes, "process", "processes"))
        return None if failed else NO_MEMORY
    return None


def table(rows: Iterable[tuple[str, MeasuredTest, MemoryLimits, Compared | None]]) -> Iterator[str]:
    """Yield the table of all measured tests, the highest peak first."""
    ordered = sorted(rows, key=lambda row: -_peak(row[1].fullest))
    head = ("peak", "limit", "baseline", "reserved", "largest", "values read", "test")
    cells = [head, *(_cells(*row) for row in ordered)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        left = [cell.rjust(width) for cell, width in zip(row[:4], widths, strict=False)]
        right = [row[4].ljust(widths[4]), row[5].rjust(widths[5]), row[6]]
        yield "  ".join([*left, *right]).rstrip()


def _cells(
    name: str, measured: MeasuredTest, limits: MemoryLimits, compared: Compared | None
) -> tuple[str, ...]:
    memory = measured.fullest or PeakMemory()
    component, size = max(memory.by_component.items(), key=lambda each: each[1], default=("", 0))
    change = compared.diff.peak_allocated if compared and compared.diff else None
    return (
        _size(memory.peak_allocated),
        _size(limits.peak),
        "" if change is None else signed(change) if change else "same",
        _size(memory.peak_reserved),
        f"{words(component)} {format_size(size)}" if component else "",
        f"{measured.conditions.values_read:,}" if measured.conditions.is_phantom else "",
        name,
    )


def conditions_line(conditions: Sequence[Conditions]) -> str:
    """Return where the tests were measured, for the heading of the table."""
    places = dict.fromkeys(
        _place(each).removeprefix("Measured ").rstrip(".") for each in conditions
    )
    return "GPU memory of tests " + ", and ".join(places)


def _place(conditions: Conditions) -> str:
    name = conditions.gpu_model
    product = next((gpu.product for gpu in CATALOG if gpu.name == name), f"GPU of {name}")
    kind = f"phantom {product}" if conditions.is_phantom else product
    version = f" with PyTorch {conditions.torch}" if conditions.torch else ""
    return f"Measured on a {kind}{version}."


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def _peak(memory: PeakMemory | None) -> int:
    return (memory.peak_allocated or 0) if memory else 0
