"""Colors for everything that torchmem distinguishes: parts of memory, states, causes, severities.

Plain hex values, the same for dark and light themes. Any two colors that can be neighbors differ
for the color-blind too, which tests/dashboards/test_colors.py checks by simulation. The dashboards
and the exporter's page both read these tables. Those of memory are in memory_parts.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchmem.metrics import memory_parts

GOOD = "#3ba77a"
ATTENTION = "#ff7e07"
FAILED = "#de3948"
NOTICE = "#4e84fc"

PARTS: Mapping[str, str] = {name: part.color for name, part in memory_parts.PARTS.items()}

PART_OPACITY = 0.85
FREE_OPACITY = 0.3
"""The opacity of areas; free memory is paler, because it is the background of the others."""

COMPONENTS: Mapping[str, str] = {name: part.color for name, part in memory_parts.COMPONENTS.items()}

STATES: Mapping[str, str] = {
    "running": GOOD,
    "stalled": "#fbe04e",
    "exited": "#c3c3cc",
    "failed": "#f493a3",
    "oom": FAILED,
    "killed": ATTENTION,
}

CAUSES: Mapping[str, str] = {
    "capacity": PARTS["in_use"],
    "fragmentation": PARTS["stranded"],
    "limit": "#9049b4",
    "external": PARTS["other_processes"],
    "pending": PARTS["releasable"],
    "library": PARTS["outside_allocator"],
}
"""Causes of an OOM, in the color of the part of memory that was to blame."""

TRENDS: Mapping[str, str] = {
    "leak": COMPONENTS["held"],
    "kept": COMPONENTS["held"],
    "larger_step": COMPONENTS["step"],
    "outside": PARTS["outside_allocator"],
}
"""Trends that end in an OOM, likewise."""

SEVERITIES: Mapping[str, str] = {"critical": FAILED, "warning": ATTENTION, "info": NOTICE}


def legend_color(name: str) -> str:
    """Return the color of a part of a bar, whose stripes tell what is pending from tensors."""
    if name == "pending":
        return PARTS["in_use"]
    return COMPONENTS.get(name) or PARTS[name]


def css() -> str:
    """Return the tables as custom properties of CSS, such as --part-free."""
    parts = {name: legend_color(name) for name in [*COMPONENTS, *PARTS]}
    tables = {"part": parts, "state": STATES, "cause": CAUSES}
    lines = (
        f"  --{kind}-{name.replace('_', '-')}: {color};"
        for kind, table in tables.items()
        for name, color in table.items()
    )
    opacity = f"  --free-opacity: {FREE_OPACITY};"
    return "\n".join([":root {", *lines, opacity, "}", ""])
