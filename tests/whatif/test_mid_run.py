"""Recordings that begin in the middle of a run: what they tell of the memory before them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocator_programs import SETTINGS
from support.late_recordings import ADDRESSES, CONF, late_recording
from support.recording_allocator import RecordingAllocator, RecordingGpu

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.simulator.blocks import BlockOrder
from torchmem.whatif.engine import what_if
from torchmem.whatif.inference import infer, topological_order
from torchmem.whatif.reproduction import reproduce
from torchmem.whatif.run_facts import run_facts

BLOCK_ORDERS: tuple[BlockOrder, ...] = ("address", "block", "segment")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(SETTINGS)),
    st.sampled_from(BLOCK_ORDERS),
    st.sampled_from(ADDRESSES),
    st.integers(0, 10_000),
    st.floats(0.1, 0.9),
)
def test_the_true_order_is_never_contradicted(
    name: str, order: BlockOrder, addresses: str, seed: int, start: float
) -> None:
    """Under every setting, each choice of the allocator agrees with its own order of blocks."""
    recording = late_recording(SETTINGS[name], order, addresses, seed, start)
    config = AllocatorConfig.parse(SETTINGS[name].conf)
    known, *others = infer(recording, config, order)
    assert (0, order, []) == (known.contradictions, known.order, others)
    best, *_ = infer(recording, config, None)
    assert best.contradictions == 0


@pytest.mark.parametrize("addresses", ADDRESSES)
@pytest.mark.parametrize("order", BLOCK_ORDERS)
def test_a_recording_from_the_middle_is_reproduced(order: BlockOrder, addresses: str) -> None:
    """Wherever the driver puts memory, every allocation gets its recorded address."""
    for seed, name in enumerate(("default", "small_blocks", "fraction", "max_split", "streams")):
        setting = SETTINGS[name]
        recording = late_recording(setting, order, addresses, seed, 0.4)
        gpu_bytes = int(setting.fraction * setting.gpu)
        fidelity = what_if(recording, gpu_bytes=gpu_bytes, settings=()).fidelity
        assert fidelity.block_order in {order, None}
        assert fidelity.landed == fidelity.allocations > 50


def test_the_order_of_the_segments_is_needed() -> None:
    """Without what the recording tells of it, a late recording lands elsewhere."""
    recording = late_recording(SETTINGS["default"], "segment", "descending", 5, 0.35)
    run = run_facts(recording, SETTINGS["default"].gpu, None, {"torch": "2.13.0"})
    (inference,) = run.inferences
    unordered = replace(inference, oldest_first=())
    inferred, blind = (
        reproduce(run, each, max_misses=run.events, on_sample=lambda _: None)
        for each in (inference, unordered)
    )
    assert inferred.misses == 0 < blind.misses


def test_cycles_of_pairs_have_an_order_too() -> None:
    """Every key occurs once; the lowest rank comes first where pairs allow it or contradict."""
    ranks = {-1: 10, -2: 20, -3: 30, -4: 40}
    assert topological_order([], ranks) == [-1, -2, -3, -4]
    assert topological_order([(-3, -2)], ranks) == [-1, -3, -2, -4]
    assert topological_order([(-1, -2), (-2, -1), (-2, -3)], ranks) == [-4, -1, -2, -3]


def test_slack_is_found_where_a_block_starts() -> None:
    """A block that was freed in the trace was as long as the next allocation behind it shows."""
    allocator = RecordingAllocator(RecordingGpu(1 << 30), AllocatorConfig.parse(""))
    whole = [allocator.malloc(size) for size in (4 * MIB, 16 * MIB)]
    allocator.free(whole[0])
    held = allocator.malloc(4 * MIB - 1000 * 512)  # takes the whole block of 4 MiB
    allocator.free(whole[1])
    seen = len(allocator.events)
    allocator.malloc(2 * MIB)
    allocator.free(held)
    recording = allocator.recording({CONF: ""}, allocator.events[seen:])
    (segment,) = infer(recording, AllocatorConfig.parse(""), "segment")[0].before.segments

    assert [block["size"] for block in segment["blocks"]] == [4 * MIB, 16 * MIB]
