"""The columns of `torchmem top` and what they mean, in the words of the metric catalog."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.memory_parts import COMPONENTS, PARTS, MemoryPart


@dataclass(frozen=True, slots=True)
class ScreenColumn:
    """One column of the ranks.

    `width` is negative for text, which is left-aligned, and 0 for the run, which has what is left.
    Where the terminal is narrow, the columns with the highest `dropped` go first; those with 0
    stay. `title` says what the name does not; `selector` is that of the series, if the metric has
    more.
    """

    name: str
    width: int
    title: str
    metric: MetricSpec | None = None
    selector: str = ""
    dropped: int = 0

    @property
    def meaning(self) -> str:
        """What the column shows, in the words of the metric catalog."""
        if self.metric is None:
            return f"{self.title[0].upper()}{self.title[1:]}."
        series = f"{self.metric.name}{self.selector}"
        return f"{', '.join(filter(None, (self.title, series)))}: {self.metric.help}"


COLUMNS = (
    ScreenColumn("rank", 4, "global rank of the process"),
    ScreenColumn("run", 0, "name of the run"),
    ScreenColumn("pid", 7, "process ID on the node", dropped=5),
    ScreenColumn("state", -7, "", catalog.PROCESS_STATE, dropped=2),
    ScreenColumn("tensors", 7, "", catalog.ALLOCATED, dropped=4),
    ScreenColumn("reserved", 8, "", catalog.RESERVED, dropped=3),
    ScreenColumn("headroom", 8, "", catalog.HEADROOM, '{flush="true"}', dropped=1),
    ScreenColumn("FI", 4, "fragmentation index", catalog.FRAGMENTATION),
    ScreenColumn("retries", 7, "", catalog.ALLOC_RETRIES),
    ScreenColumn("OOMs", 4, "OutOfMemoryErrors", catalog.OOMS),
)
GPU_VALUES = (
    ScreenColumn("free", 0, "", catalog.NVML_MEMORY_FREE),
    ScreenColumn("°C", 0, "", catalog.NVML_TEMPERATURE, '{sensor="gpu"}'),
    ScreenColumn("W", 0, "", catalog.NVML_POWER),
    ScreenColumn("%", 0, "", catalog.NVML_UTILIZATION, '{engine="gpu"}'),
)
"""The numbers beside the bar of a GPU."""

MEMORY_PARTS: Sequence[MemoryPart] = (*COMPONENTS.values(), *PARTS.values())
MIN_RUN_COLUMNS = 8
MARK_COLUMNS = 2
"""The columns before the first one, for the mark of the selected rank."""


def fixed_width(columns: Iterable[ScreenColumn]) -> int:
    """Return how many characters a line takes without the run."""
    return MARK_COLUMNS - 1 + sum(abs(column.width) + 1 for column in columns)


def fitting(width: int) -> tuple[ScreenColumn, ...]:
    """Return the columns to show in `width` characters."""
    shown = list(COLUMNS)
    while fixed_width(shown) + MIN_RUN_COLUMNS > width:
        first = max(shown, key=lambda column: column.dropped)
        if not first.dropped:
            break
        shown.remove(first)
    return tuple(shown)
