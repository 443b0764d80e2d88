"""Colors for everything that torchmem distinguishes: parts of memory, states, causes, severities.

Plain hex values, the same for dark and light themes. Any two colors that can be neighbors differ
for the color-blind too, which tests/dashboards/test_colors.py checks by simulation. The dashboards
and the exporter's page both read this table.
"""

from __future__ import annotations

from collections.abc import Mapping

GOOD = "#3ba77a"
ATTENTION = "#ff7e07"
FAILED = "#de3948"
NOTICE = "#4e84fc"

PARTS: Mapping[str, str] = {
    "in_use": "#4e84fc",
    "stranded": "#f09225",
    "releasable": "#9fe4eb",
    "private_pools": "#9223a8",
    "cached": "#a1a6df",
    "outside_allocator": "#fae15f",
    "other_processes": "#b36109",
    "driver": "#604763",
    "not_pytorch": "#968c95",
    "free": "#a5de79",
}
"""The parts of a device's memory by their names in gpu:torchmem_memory_bytes:sum, bottom first."""

PART_OPACITY = 0.85
FREE_OPACITY = 0.3
"""The opacity of areas; free memory is paler, because it is the background of the others."""

COMPONENTS: Mapping[str, str] = {
    "parameters": "#5844d7",
    "gradients": "#bff2ef",
    "gradients_or_step": "#f6a213",
    "optimizer_state": "#368e5e",
    "held": "#daa6fc",
    "step": "#984e82",
    "pending": "#1891f6",
    "rounding": "#9faba9",
    "other": "#eff4ac",
}
"""What holds the bytes of tensors, bottom first; `other` stands for the parts that users name."""

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
    "outside": PARTS["outside_allocator"],
}
"""Trends that end in an OOM, likewise."""

SEVERITIES: Mapping[str, str] = {"critical": FAILED, "warning": ATTENTION, "info": NOTICE}


def css() -> str:
    """Return the table as custom properties of CSS, such as --part-free."""
    tables = {"part": PARTS, "component": COMPONENTS, "state": STATES, "cause": CAUSES}
    lines = (
        f"  --{kind}-{name.replace('_', '-')}: {color};"
        for kind, table in tables.items()
        for name, color in table.items()
    )
    opacity = f"  --free-opacity: {FREE_OPACITY};"
    return "\n".join([":root {", *lines, opacity, "}", ""])
