"""Facts that the page and `torchmem top` repeat, because they cannot import them."""

from __future__ import annotations

from importlib import resources

import msgspec
import pytest

from torchmem.allocator import sizes
from torchmem.explain import parts
from torchmem.exporter.live import state
from torchmem.top import node

STATIC = resources.files("torchmem.exporter.live") / "static"


@pytest.mark.parametrize(
    ("file", "name", "size"),
    [
        ("recording.js", "SMALL_SEGMENT", sizes.SMALL_BUFFER),
        ("recording.js", "LARGE_PAGE", sizes.LARGE_BUFFER),
        ("memory_layout.js", "SMALL_PAGE", sizes.SMALL_BUFFER),
    ],
)
def test_the_page_has_the_allocators_sizes(file: str, name: str, size: int) -> None:
    """The page reads snapshots with the sizes of segments in allocator/sizes.py."""
    source = (STATIC / file).read_text("utf-8")
    assert f"const {name} = {size // sizes.MIB} * MIB;" in source
    assert "const MIB = 2 ** 20;" in source


@pytest.mark.parametrize(
    ("read", "served"),
    [
        (node.MemoryShare, state.PartState),
        (node.LegendRow, parts.LegendEntry),
        (node.Why, state.ThreatText),
        (node.Rank, state.RankState),
        (node.Gpu, state.GpuState),
        (node.NvmlStatus, state.NvmlState),
        (node.Node, state.NodeState),
    ],
)
def test_top_reads_fields_that_the_exporter_serves(
    read: type[msgspec.Struct], served: type
) -> None:
    """`torchmem top` reads no field that the state document does not have."""
    assert set(read.__struct_fields__) <= set(served.__annotations__)
