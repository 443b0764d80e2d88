"""Facts that the page and `torchmem top` repeat, because they cannot import them."""

from __future__ import annotations

import re
from importlib import resources

import msgspec
import pytest

from torchmem.exporter.live import parts, state
from torchmem.metrics import colors
from torchmem.top import bars, node

STATIC = resources.files("torchmem.exporter.live") / "static"
NAMES = {entry.name for entry in parts.LEGEND}


def test_the_page_takes_each_color_from_the_right_table() -> None:
    """The page knows which names of the legend have the color of a component."""
    source = (STATIC / "colors.js").read_text("utf-8")
    listed = re.search(r"const COMPONENTS = new Set\(\[(.*?)\]\)", source, re.DOTALL)

    assert listed is not None
    assert NAMES & colors.COMPONENTS.keys() - {"pending"} == set(re.findall(r'"(\w+)"', listed[1]))


def test_each_name_of_the_legend_has_its_own_letter() -> None:
    """Without colors, `torchmem top` tells all uses of memory apart."""
    assert bars.LETTERS.keys() == NAMES
    assert len(set(bars.LETTERS.values())) == len(NAMES)


@pytest.mark.parametrize(
    ("read", "served"),
    [
        (node.Part, parts.UseState),
        (node.LegendEntry, parts.LegendEntry),
        (node.Why, state.Reason),
        (node.Rank, state.RankState),
        (node.Gpu, state.GpuState),
        (node.Nvml, state.NvmlState),
        (node.Node, state.NodeState),
    ],
)
def test_top_reads_fields_that_the_exporter_serves(
    read: type[msgspec.Struct], served: type[msgspec.Struct]
) -> None:
    """`torchmem top` reads no field that the state document does not have."""
    assert set(read.__struct_fields__) <= set(served.__struct_fields__)
