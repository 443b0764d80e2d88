"""The parts of a GPU: what each rank holds, and what is left."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.samples import devices, full_sample

from torchmem.explain.parts import (
    LEGEND,
    PartBytes,
    device_parts,
    gpu_parts,
    plausible,
    rank_parts,
    tensor_bytes,
)
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.sample.libraries import Communicator, RmmMemory
from torchmem.sample.sample import Allocator, ByPool, DeviceSample

GIB = 1 << 30
MIB = 1 << 20
NAMES = [entry.name for entry in LEGEND]


def total(parts: tuple[PartBytes, ...]) -> int:
    return sum(part.bytes for part in parts)


@st.composite
def memories(draw: st.DrawFn) -> MemoryInfo:
    used, free, reserved = draw(st.tuples(*[st.integers(0, 64 * GIB)] * 3))
    return MemoryInfo(used + free + reserved, used, free, reserved)


@given(devices, st.none() | st.integers(-4 * GIB, 4 * GIB))
def test_parts_of_a_rank_add_up(device: DeviceSample, outside: int | None) -> None:
    """Whatever a sample claims, the parts add up to its reserved bytes and those outside.

    Or to those of the reserved bytes that are on the device, such as in vLLM's sleep mode.
    """
    parts = rank_parts(device, outside)

    allocator = device.allocator
    reserved = plausible(allocator.reserved_bytes.total) if allocator else None
    if allocator is None and device.rmm and device.rmm.serves_pytorch:
        assert total(parts) == device.rmm.held_bytes
    else:
        assert total(parts) == (0 if reserved is None else max(0, reserved + (outside or 0)))
    assert all(part.bytes > 0 for part in parts)


@given(memories(), st.lists(devices, max_size=3), *[st.integers(0, 80 * GIB)] * 2)
def test_parts_of_a_gpu_add_up(
    memory: MemoryInfo, ranks: list[DeviceSample], driver_free: int, dead: int
) -> None:
    """Whatever ranks and dead processes hold, the parts add up to NVML's total, in order."""
    held = [rank_parts(device, GIB) for device in ranks]
    parts = gpu_parts(memory.total, held, driver_free, memory.reserved, dead)

    assert total(parts) == memory.total
    assert [part.name for part in parts] == sorted((p.name for p in parts), key=NAMES.index)
    assert len({part.name for part in parts}) == len(parts)


def test_dead_processes_hold_a_part_of_what_is_not_the_ranks() -> None:
    """They have at most what is neither free nor of a rank; without NVML's memory as well."""
    ranks, dead = [[PartBytes("held", 4 * GIB)]], PartBytes("dead_processes", GIB)
    assert gpu_parts(10 * GIB, ranks, 3 * GIB, 0, GIB)[1:3] == (
        PartBytes("other_processes", 2 * GIB),
        dead,
    )
    assert gpu_parts(10 * GIB, ranks, 3 * GIB, None, GIB)[1:3] == (
        dead,
        PartBytes("not_pytorch", 2 * GIB),
    )
    assert gpu_parts(10 * GIB, ranks, 5 * GIB, 0, 8 * GIB)[1:2] == (dead,)


def test_parts_of_a_known_rank() -> None:
    """Components, cache and what is outside each have their own bytes; scripts name their own."""
    device = full_sample().devices[0]
    parts = {part.label or part.name: part.bytes for part in rank_parts(device, GIB)}

    assert device.allocator is not None
    assert device.layout is not None
    assert parts["parameters"] == 8 * GIB
    assert parts["kv_cache"] == 2 * GIB
    assert parts["pending"] == GIB
    assert (parts["communicators"], parts.get("rmm"), parts.get("outside_allocator")) == (
        GIB,
        None,
        None,
    )
    free = device.layout.stranded_bytes / device.layout.free_bytes
    assert abs(parts["stranded"] / (parts["stranded"] + parts["releasable"]) - free) < 1e-6


def test_the_drivers_own_pool_has_no_stranded_bytes() -> None:
    """cudaMallocAsync tells its pool's size and what is in use, and has no snapshots."""
    held, used = ByPool(None, None, 50 * GIB), ByPool(None, None, 40 * GIB)
    pool = Allocator(used, used, held, None, None, 40 * GIB, 40 * GIB, 50 * GIB)
    device = DeviceSample(0, None, None, 80 * GIB, pool, driver_free_bytes=28 * GIB)

    parts = {part.name: part.bytes for part in device_parts(device, 28 * GIB)}

    assert parts == {
        "in_use": 40 * GIB,
        "cached": 10 * GIB,
        "not_pytorch": 2 * GIB,
        "free": 28 * GIB,
    }


def test_tensors_in_the_middle_of_a_step() -> None:
    """Tensors are one number from one time: the time of the snapshot, if it shows more in use.

    What lasts from step to step was there as well; gradients and the step cannot be told apart.
    """
    device = full_sample().devices[0]
    assert device.layout is not None
    layout = replace(device.layout, stranded_bytes=5 * GIB, pending_free_bytes=2 * GIB)
    in_use = 60 * GIB + (2 << 20) - layout.free_bytes - layout.private_free_bytes
    device = replace(device, layout=replace(layout, in_use_bytes=in_use))
    parts = {part.label or part.name: part.bytes for part in rank_parts(device, GIB)}

    assert in_use == 47 * GIB + GIB // 2 + (2 << 20)
    assert parts["pending"] == 2 * GIB
    assert parts["parameters"] == 8 * GIB
    assert "gradients" not in parts
    assert "step" not in parts
    assert tensor_bytes(device, GIB, rank_parts(device, GIB)) == in_use - parts["pending"]
    assert parts["gradients_or_step"] == in_use - sum(
        parts[name] for name in ("parameters", "optimizer_state", "kv_cache", "held", "pending")
    )


def test_what_is_outside_is_divided_by_owner() -> None:
    """NCCL's communicators are a part of what is outside, and never more than that is."""
    nccl = {"tp": Communicator(GIB, GIB, GIB), "dp": Communicator(GIB // 2, is_counted=False)}
    device = replace(
        full_sample().devices[0], communicators=nccl, rmm=RmmMemory(GIB), components={}
    )
    parts = {part.name: part.bytes for part in rank_parts(device, 4 * GIB)}
    fewer = {part.name: part.bytes for part in rank_parts(device, 3 * GIB)}

    names = ("communicators", "rmm", "outside_allocator")
    assert [parts.get(name) for name in names] == [5 * GIB // 2, GIB, GIB // 2]
    assert [fewer.get(name) for name in names] == [5 * GIB // 2, GIB // 2, None]


def test_memory_of_rmm_as_pytorchs_allocator() -> None:
    """PyTorch has no statistics then, and the pool is all that is known of the rank."""
    rmm = RmmMemory(6 * GIB, 2 * GIB, serves_pytorch=True)
    device = replace(full_sample().devices[0], allocator=None, layout=None, rmm=rmm)

    assert rank_parts(device, None) == (PartBytes("rmm", 6 * GIB),)
    assert rank_parts(replace(device, rmm=replace(rmm, serves_pytorch=False)), None) == ()


def test_without_nvml_nccl_is_still_known() -> None:
    """A report says what NCCL holds of the bytes that are neither free nor PyTorch's."""
    nccl = {"tp": Communicator(GIB, GIB)}
    device = replace(full_sample().devices[0], communicators=nccl, rmm=None, components={})
    parts = {part.name: part.bytes for part in device_parts(device, 10 * GIB)}

    assert (parts["communicators"], parts["not_pytorch"]) == (2 * GIB, 8 * GIB - 2 * MIB)


@given(devices)
def test_tensors_are_the_parts_of_tensors(device: DeviceSample) -> None:
    """The bytes of tensors are those of the parts that neither wait for a stream nor are free."""
    parts = rank_parts(device, None)
    others = {"pending", "stranded", "releasable", "private_pools", "cached"}

    expected = total(tuple(part for part in parts if part.name not in others))
    assert tensor_bytes(device, None, parts) == (None if device.allocator is None else expected)


def test_what_came_since_the_snapshot_is_no_tensor() -> None:
    """Memory that was reserved after an early snapshot is cached, unless it is in use now."""
    device = full_sample().devices[0]
    assert device.layout is not None
    early = replace(
        device.layout,
        in_use_bytes=GIB,
        releasable_bytes=GIB,
        stranded_bytes=0,
        private_free_bytes=0,
        largest_free_block_bytes=GIB,
    )
    parts = {part.name: part.bytes for part in rank_parts(replace(device, layout=early), None)}

    assert {name: parts[name] for name in ("releasable", "cached")} == {
        "releasable": GIB,
        "cached": 18 * GIB + MIB,
    }
    assert "step" not in parts


def test_a_gpu_without_nvml() -> None:
    """Without NVML, what is neither free nor PyTorch's is one part, and free is the driver's."""
    parts = gpu_parts(10 * GIB, [[PartBytes("held", 4 * GIB)]], 5 * GIB)

    assert parts == (
        PartBytes("held", 4 * GIB),
        PartBytes("not_pytorch", GIB),
        PartBytes("free", 5 * GIB),
    )


def test_unknown_memory_is_not_in_use() -> None:
    """Without NVML and a running rank, only what ranks hold is known."""
    assert gpu_parts(10 * GIB, [[PartBytes("held", 4 * GIB)]], None) == (
        PartBytes("held", 4 * GIB),
    )
    assert gpu_parts(10 * GIB, [], None) == ()


def test_ranks_that_do_not_fit_together_shrink_what_is_free_first() -> None:
    """Tensors keep their bytes while the ranks' free memory can give up what is too much."""
    ranks = [
        [PartBytes("parameters", 5 * GIB), PartBytes("releasable", 2 * GIB)],
        [PartBytes("held", 4 * GIB)],
    ]

    assert gpu_parts(10 * GIB, ranks, GIB, 0) == (
        PartBytes("parameters", 5 * GIB),
        PartBytes("held", 4 * GIB),
        PartBytes("releasable", GIB),
    )


@given(devices, st.integers(0, 80 * GIB))
def test_a_report_has_the_parts_of_the_page(device: DeviceSample, free: int) -> None:
    """What a report says that a rank holds is what the page shows, if it fits on the device.

    RMM is outside PyTorch's memory, or is all of it.
    """
    whole = device_parts(device, free)
    held = rank_parts(device, None)

    if whole:
        assert device.total_bytes == total(whole)
    if whole and total(held) <= (device.total_bytes or 0):
        outside = {"not_pytorch", "communicators", "rmm", "free"}
        assert [part for part in whole if part.name not in outside] == [
            part for part in held if part.name not in outside
        ]
