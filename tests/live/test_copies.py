"""Facts that the page and `torchmem top` repeat, because they cannot import them."""

from __future__ import annotations

import msgspec
import pytest

from torchmem.exporter.live import parts, state
from torchmem.top import node


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
