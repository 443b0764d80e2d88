"""The columns of `torchmem top` and what they mean, in the words of the metric catalog."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.memory_parts import COMPONENTS, PARTS, MemoryPart


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the ranks.

    `width` is negative for text, which is left-aligned, and 0 for the run, which has what is left.
    Where the terminal is narrow, the columns with the highest `dropped` go first; those with 0
    stay. `series` is the selector of what is shown, if it is less than the whole metric.
    """

    name: str
    width: int
    metric: MetricSpec
    title: str
    dropped: int = 0
    series: str = ""


COLUMNS = (
    Column("rank", 4, catalog.PROCESS_INFO, "global rank of the process"),
    Column("run", 0, catalog.PROCESS_INFO, "name of the run"),
    Column("pid", 7, catalog.PROCESS_INFO, "process ID on the node", dropped=5),
    Column("state", -7, catalog.PROCESS_STATE, "state of the process", dropped=2),
    Column("tensors", 7, catalog.ALLOCATED, "memory of tensors", dropped=4),
    Column("reserved", 8, catalog.RESERVED, "memory reserved by PyTorch", dropped=3),
    Column("headroom", 8, catalog.HEADROOM, "headroom", dropped=1, series='{flush="true"}'),
    Column("FI", 4, catalog.FRAGMENTATION, "fragmentation index"),
    Column("retries", 7, catalog.ALLOC_RETRIES, "retries after a flush of the cache"),
    Column("OOMs", 4, catalog.OOMS, "OutOfMemoryErrors"),
)
GPU_VALUES = (
    Column("free", 0, catalog.NVML_MEMORY_FREE, "free memory"),
    Column("°C", 0, catalog.NVML_TEMPERATURE, "temperature", series='{sensor="gpu"}'),
    Column("W", 0, catalog.NVML_POWER, "power"),
    Column("%", 0, catalog.NVML_UTILIZATION, "utilization", series='{engine="gpu"}'),
)
"""The numbers beside the bar of a GPU."""

MEMORY_PARTS: Sequence[MemoryPart] = (*COMPONENTS.values(), *PARTS.values())
MIN_RUN_COLUMNS = 8
MARK_COLUMNS = 2
"""The columns before the first one, for the mark of the selected rank."""


def fixed_width(columns: Iterable[Column]) -> int:
    """Return how many characters a line takes without the run."""
    return MARK_COLUMNS - 1 + sum(abs(column.width) + 1 for column in columns)


def fitting(width: int) -> tuple[Column, ...]:
    """Return the columns to show in `width` characters."""
    shown = list(COLUMNS)
    while fixed_width(shown) + MIN_RUN_COLUMNS > width:
        first = max(shown, key=lambda column: column.dropped)
        if not first.dropped:
            break
        shown.remove(first)
    return tuple(shown)
