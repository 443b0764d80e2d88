"""The colors of the dashboards can be told apart, in both themes and by the color-blind."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, pairwise

import numpy as np
import pytest
from colorspacious import cspace_convert

from torchmem.explain.parts import LEGEND
from torchmem.metrics import colors

# Grafana's panel backgrounds.
BACKGROUNDS = {"dark": "#181b1f", "light": "#ffffff"}
VISIONS = ("full", "deuteranomaly", "protanomaly", "tritanomaly")
# Differences in CAM02-UCS, where 1 is just visible side by side.
MIN_DIFFERENCE = 10
MIN_DIFFERENCE_OF_NEIGHBORS = 13

TABLES: dict[str, Mapping[str, str]] = {
    "parts": colors.PARTS,
    "components": colors.COMPONENTS,
    "states": colors.STATES,
    "causes": colors.CAUSES,
    "severities": colors.SEVERITIES,
    "levels": {"good": colors.GOOD, "attention": colors.ATTENTION, "failed": colors.FAILED},
}
STACKS = (colors.PARTS, colors.COMPONENTS)
each_view = pytest.mark.parametrize(
    ("vision", "theme"), [(vision, theme) for vision in VISIONS for theme in BACKGROUNDS]
)
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def rgb(color: str) -> np.ndarray:
    """Return red, green and blue from 0 to 1."""
    return np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])


def seen(name: str, color: str, vision: str, theme: str) -> np.ndarray:
    """Return an area of this color in CAM02-UCS, as it looks on the background of the theme."""
    opacity = colors.FREE_OPACITY if name == "free" else colors.PART_OPACITY
    shown = opacity * rgb(color) + (1 - opacity) * rgb(BACKGROUNDS[theme])
    if vision != "full":
        deficiency = {"name": "sRGB1+CVD", "cvd_type": vision, "severity": 100}
        shown = np.clip(cspace_convert(shown, deficiency, "sRGB1"), 0, 1)
    return np.asarray(cspace_convert(shown, "sRGB1", "CAM02-UCS"))


@each_view
@each_table
def test_colors_of_one_table_differ(table: Mapping[str, str], vision: str, theme: str) -> None:
    """Any two colors of a table differ clearly; two that touch in a stack differ even more."""
    views = {name: seen(name, color, vision, theme) for name, color in table.items()}
    neighbors = set(pairwise(table)) if table in STACKS else set()
    for pair in combinations(table, 2):
        least = MIN_DIFFERENCE_OF_NEIGHBORS if pair in neighbors else MIN_DIFFERENCE
        assert np.linalg.norm(views[pair[0]] - views[pair[1]]) >= least, pair


@each_view
def test_parts_that_are_near_on_the_live_page_differ(vision: str, theme: str) -> None:
    """Parts of a bar with up to three others between them differ; stripes mark what is pending."""
    entries = [entry for entry in LEGEND if entry.name != "pending"]
    views = [seen(entry.name, entry.color, vision, theme) for entry in entries]
    for first, second in combinations(range(len(entries)), 2):
        if second - first < 5:
            names = entries[first].name, entries[second].name
            assert np.linalg.norm(views[first] - views[second]) >= MIN_DIFFERENCE, names


def test_a_color_is_six_hex_digits() -> None:
    """Every color is a plain hex value, which Grafana, CSS and terminals understand."""
    values = [color for table in TABLES.values() for color in table.values()]
    assert all(len(color) == 7 and int(color[1:], 16) >= 0 for color in values)
