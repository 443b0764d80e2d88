"""The figures as Markdown tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.overhead import tools

from torchmem.sdk.settings import Settings

Figures = dict[str, Any]


def rows_of(module: str, numbers: Iterable[str]) -> list[list[str]]:
    """Run `python -m module row NUMBER` for each number; the last line is a row, with tabs."""
    command = [sys.executable, "-W", "ignore", "-m", module, "row"]
    done = (
        subprocess.run([*command, number], stdout=subprocess.PIPE, text=True, check=True)
        for number in numbers
    )
    return [process.stdout.splitlines()[-1].split("\t") for process in done]


def show_reads(rows: list[Figures]) -> str:
    """Format the CPU time of each part by the number of blocks."""
    names = ("step", "stats", "no_news", "publication", "snapshot")
    head = ("blocks", "step", "read of statistics", "tick without news", "publication", "snapshot")
    return table(
        head, [(f"{row['blocks']:,}", *(microseconds(row[name]) for name in names)) for row in rows]
    )


def show_shares(shares: list[Figures], reads: list[Figures]) -> str:
    """Format each tool's share of one core, and the SDK's own account of its share."""
    head = ("tool", *(f"{share['nothing']['blocks']:,} blocks" for share in shares))
    rows = [
        [name, *(share_of(name, share) for share in shares)]
        for name in tools.TOOLS
        if name != "nothing"
    ]
    account = [
        "torchmem, by its own account",
        *(percent(_exported(share["torchmem"])) for share in shares),
    ]
    costs = {row["blocks"]: row["snapshot"] for row in reads}
    usual = [
        "torchmem, in the long run",
        *(percent(long_run(share["torchmem"], costs)) for share in shares),
    ]
    return table(head, [*rows, account, usual])


def share_of(name: str, share: Figures) -> str:
    """Format the CPU time of the process with the tool minus that without."""
    if name not in share:
        return tools.missing(name) or ""
    with_it, without = (share[key]["cpu"] / share[key]["wall"] for key in (name, "nothing"))
    return percent(with_it - without)


def _exported(row: Figures) -> float:
    return float(row["exported"] / row["exported_wall"])


def long_run(row: Figures, costs: dict[int, float]) -> float:
    """Return the share with the average number of snapshots, however many were measured."""
    cost, settings = costs[row["blocks"]], Settings()
    routine = row["exported"] - row["snapshots"] * cost
    pause = max(settings.snapshot_interval, row["snapshot_seconds"] / settings.snapshot_budget)
    return float(routine / row["exported_wall"] + cost / pause)


def show_busy(busy: dict[int, Figures]) -> str:
    """Format the SDK's own account of its share in a process that computes between its steps."""
    head = ("steps per second", *map(str, busy))
    return table(head, [("torchmem", *(percent(_exported(row)) for row in busy.values()))])


def show_steps(steps: Figures | None) -> str:
    """Format the step time with a tool, as a multiple of that without."""
    if steps is None:
        return "Step time needs PyTorch with a GPU, real or phantom."
    head = ("tool", "step time", "CPU time of the process")
    rows = [
        (name, ratio(steps[name]["wall"]), ratio(steps[name]["cpu"]))
        if name in steps
        else (name, tools.missing(name) or "", "")
        for name in tools.TOOLS
    ]
    return (
        table(head, rows)
        + f"\n\nA step takes {steps['nothing']['step_seconds'] * 1e3:.1f} ms without a tool."
    )


def show(figures: Figures) -> str:
    """Format the whole report."""
    imports = [
        f"{seconds * 1e3:.1f} ms beyond {module}" for module, seconds in figures["import"].items()
    ]
    memory = [
        f"{mebibytes(lasting)} at {int(blocks):,} blocks, {mebibytes(highest)} at its highest"
        for blocks, (lasting, highest) in figures["memory"].items()
    ]
    shares = show_shares(figures["shares"], figures["reads"])
    steps = show_steps(figures.get("steps"))
    return "\n\n".join(
        [
            f"Measured on {figures['where']}.",
            f"CPU time of one call, by the number of blocks:\n\n{show_reads(figures['reads'])}",
            f"Share of one core at default settings:\n\n{shares}",
            f"The same in a process that computes all the time:\n\n{show_busy(figures['busy'])}",
            f"In turns with no tool, median ratio and 95% interval:\n\n{steps}",
            f"Import of torchmem.sdk: {', '.join(imports)}.\nMemory: {'; '.join(memory)}.",
        ]
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    ruler = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [cells[0], ruler, *cells[1:]]
    )


def microseconds(seconds: float) -> str:
    """Format as 23.1 µs or 1,530 µs."""
    value = seconds * 1e6
    return f"{value:.1f} µs" if value < 100 else f"{value:,.0f} µs"


def percent(share: float) -> str:
    """Format a share of one core with three decimals."""
    return f"{share * 100:.3f}%"


def mebibytes(size: float) -> str:
    """Format MiB with one decimal."""
    return f"{size / (1 << 20):.1f} MiB"


def ratio(interval: Sequence[float]) -> str:
    """Format a median and the bounds of its interval."""
    middle, low, high = interval
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
