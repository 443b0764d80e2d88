"""A map of bounded size keeps the bytes of every state, and what can be returned to the driver."""

from __future__ import annotations

import gzip
import json

from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import segment, segments

from torchmem.allocator.backend import Device
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.memory_map import device_map
from torchmem.allocator.settings import DEFAULT_CONFIG
from torchmem.allocator.sizes import LARGE_BUFFER, MIB, SMALL_BUFFER
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo
from torchmem.sample.memory_map import DeviceMap, MemoryMap, SegmentMap, encode

DEVICE = Device(0, "GPU-1", "Small", 1 << 30)
Totals = dict[str, int]


def mapped(found: list[SegmentInfo], max_blocks: int = 1 << 20) -> DeviceMap:
    """The map of device 0."""
    return device_map(found, DEVICE, measure(found, 0, 0.0), DEFAULT_CONFIG, max_blocks)


def bytes_by_state(segment: SegmentMap) -> Totals:
    """The bytes of the blocks of one segment by state."""
    totals = Totals()
    for size, state in zip(segment.sizes, segment.states, strict=True):
        totals[state.lower()] = totals.get(state.lower(), 0) + size
    return totals


def releasable(segment: SegmentMap) -> int:
    """Bytes that go back to the driver, counted by hand as docs/concepts.md defines them."""
    if segment.pool_id != DEFAULT_POOL:
        return 0
    if not segment.expandable:
        return segment.sizes[0] if segment.states == "f" else 0
    page = SMALL_BUFFER if segment.pool == "small" else LARGE_BUFFER
    total, begin = 0, 0
    for size, state in zip(segment.sizes, segment.states, strict=True):
        pages = (begin + size) // page - -(-begin // page)
        total += max(0, pages) * page if state == "f" else 0
        begin += size
    return total


@given(segments())
def test_the_parts_of_a_map_are_those_of_the_sample(found: list[SegmentInfo]) -> None:
    """Allocated, reserved, pending, stranded and releasable bytes are equal to the byte."""
    device = mapped(found)
    layout, every = device.layout, [(item, bytes_by_state(item)) for item in device.segments]
    default = [totals for item, totals in every if item.pool_id == DEFAULT_POOL]

    assert sum(s["total_size"] for s in found) == sum(sum(item.sizes) for item, _ in every)
    assert layout.pending_free_bytes == sum(totals.get("p", 0) for totals in default)
    assert layout.free_bytes == sum(totals.get("f", 0) for totals in default)
    assert layout.releasable_bytes == sum(releasable(item) for item, _ in every)
    assert sorted(item.address for item, _ in every) == [item.address for item, _ in every]


@given(segments(), st.integers(1, 40))
def test_a_bounded_map_changes_no_sum(found: list[SegmentInfo], max_blocks: int) -> None:
    """Merging keeps the bytes of every state and what is releasable; what is cut is counted."""
    whole, bounded = mapped(found), mapped(found, max_blocks)

    assert sum(len(item.sizes) for item in bounded.segments) <= max_blocks
    before = {item.address: item for item in whole.segments}
    for item in bounded.segments:
        assert bytes_by_state(before[item.address]) == bytes_by_state(item)
        assert releasable(before[item.address]) == releasable(item)
    kept = sum(sum(item.sizes) for item in bounded.segments)
    assert sum(s["total_size"] for s in found) == kept + bounded.omitted_bytes
    if whole == bounded:
        assert bounded.merged_blocks == 0


def test_many_small_blocks_fit_into_the_bound() -> None:
    """200,000 blocks give a map of 100,000 at most, and no segment is left out."""
    blocks = [(512 * (1 + i % 3), "inactive" if i % 2 else "active_allocated") for i in range(2000)]
    found = [segment(i << 32, "small", blocks) for i in range(100)]
    device = device_map(found, DEVICE, measure(found, 0, 0.0), DEFAULT_CONFIG)

    count = sum(len(item.sizes) for item in device.segments)
    assert count <= 100_000
    assert (count + device.merged_blocks, device.omitted_bytes) == (200_000, 0)
    assert len(encode(MemoryMap(0.0, [device]))) < 1 << 20


def test_the_file_is_compressed_json() -> None:
    """Other programs can read it: one object with devices, segments and blocks."""
    found = [segment(4096, "large", [(3 * MIB, "active_allocated"), (MIB, "inactive")])]
    content = json.loads(gzip.decompress(encode(MemoryMap(12.5, [mapped(found)]))))

    (device,) = content["devices"]
    assert (content["schema"], content["timestamp"], device["uuid"]) == (1, 12.5, "GPU-1")
    assert device["layout"]["stranded_bytes"] == MIB
    assert device["segments"] == [
        {
            "address": 4096,
            "pool": "large",
            "stream": 0,
            "pool_id": [0, 0],
            "expandable": False,
            "sizes": [3 * MIB, MIB],
            "states": "af",
        }
    ]
