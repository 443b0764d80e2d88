"""Ranks that hold memory on the GPU of another rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from support.samples import full_sample

from torchmem.allocator.sizes import GIB, MIB
from torchmem.doctor import holders
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.subjects.misplaced import misplaced_families
from torchmem.node.gpu_holders import GpuHolders
from torchmem.node.gpu_notes import gpu_notes
from torchmem.node.published import NodeRanks, Published
from torchmem.node.why import rank_why
from torchmem.sample.sample import ByPool, DeviceSample

CONTEXT = 500 * MIB
GPUS = {f"GPU-{index}": GpuIdentity(index, f"GPU-{index}") for index in range(8)}
INDICES = {uuid: gpu.index for uuid, gpu in GPUS.items()}


def rank(number: int, *uuids: str, launch: str = "0-00000001") -> Published:
    """Return a running rank whose allocator has memory on these GPUs, most on the first one."""
    (device,) = full_sample().devices
    process = replace(
        full_sample().process, rank=number, local_rank=number, pid=100 + number, launch=launch
    )
    devices = tuple(smaller(device, uuid, 1 + at) for at, uuid in enumerate(uuids))
    sample = replace(full_sample(), process=process, devices=devices)
    return Published(sample, process.pid, "running", attributed=True)


def smaller(device: DeviceSample, uuid: str, factor: int) -> DeviceSample:
    """Return a device with a part of the reserved memory."""
    assert device.allocator is not None
    reserved = ByPool(None, None, device.allocator.reserved_bytes.total // factor)
    return replace(device, uuid=uuid, allocator=replace(device.allocator, reserved_bytes=reserved))


def on_first(
    number: int, index: int = 0, visible: int | None = 8, *, is_ranked: bool = True
) -> Published:
    """Return a rank that has all its memory on one GPU, and which it is of how many it sees."""
    item = rank(number, "GPU-0")
    (device,) = item.sample.devices
    process = item.sample.process if is_ranked else replace(item.sample.process, local_rank=None)
    devices = (replace(device, index=index, visible_devices=visible),)
    return replace(item, sample=replace(item.sample, process=process, devices=devices))


def node(ranks: Sequence[Published], held: Mapping[tuple[str, int], int]) -> NodeRanks:
    """Return the ranks of a node on which NVML lists these bytes."""
    return NodeRanks(0.0, ranks, INDICES, holders=GpuHolders(held))


EIGHT = [rank(number, f"GPU-{number}") for number in range(8)]
ON_FIRST = {("GPU-0", 100 + number): CONTEXT for number in range(8)}
OWN = {(f"GPU-{number}", 100 + number): 40 * GIB for number in range(8)}


def test_eight_contexts_on_the_first_gpu() -> None:
    """The first GPU says which ranks hold how much of it; the others have nothing to say."""
    found = node(EIGHT, {**ON_FIRST, **OWN})
    (note,) = gpu_notes(found, "GPU-0")

    assert note.text == (
        "Ranks 1, 2, 3, 4, 5, 6, 7 of run night hold 3.42 GiB here, on the GPU of rank 0."
    )
    assert note.remedy.startswith("Call torch.cuda.set_device(local_rank)")
    assert [gpu_notes(found, f"GPU-{number}") for number in range(1, 8)] == [()] * 7


@pytest.mark.parametrize("number", [0, 3])
def test_why_says_set_device_first(number: int) -> None:
    """So does the report of the rank whose GPU it is, and of one that is on it."""
    item = EIGHT[number]
    why = rank_why(node(EIGHT, {**ON_FIRST, **OWN}), item, item.sample.devices[0], may_look=True)

    expected = {0: "Ranks 1, 2,", 3: "It also holds 500.00 MiB on GPU 0, the GPU of rank 0."}
    assert why.facts[0].text.startswith(expected[number])
    assert why.advice[0].kind == "set_device"


TWO = [rank(0, "GPU-0"), rank(1, "GPU-1")]


@pytest.mark.parametrize(
    ("ranks", "held"),
    [
        ([rank(0, "GPU-0", "GPU-1"), rank(1, "GPU-2", "GPU-3")], {("GPU-1", 100): 9 * GIB}),
        ([rank(0, "GPU-0"), rank(1, "GPU-1", launch="0-00000002")], {("GPU-0", 101): CONTEXT}),
        (TWO, {("GPU-0", 101): 8 * MIB}),
        (TWO, {("GPU-5", 101): CONTEXT}),
        ([TWO[0], replace(TWO[1], attributed=False)], {("GPU-0", 101): CONTEXT}),
        ([TWO[0], replace(TWO[1], state="killed")], {("GPU-0", 101): CONTEXT}),
        (TWO, {("GPU-0", 999): 9 * GIB}),
        ([rank(0, "GPU-0"), rank(1, "GPU-0")], {("GPU-0", 100): GIB, ("GPU-0", 101): GIB}),
    ],
    ids=[
        "two GPUs for each rank",
        "another launch",
        "less than a context",
        "nobody's own GPU",
        "not certain to be that process",
        "it has ended",
        "not a rank",
        "two ranks that share a GPU",
    ],
)
def test_what_is_in_its_place_is_not_told(
    ranks: Sequence[Published], held: Mapping[tuple[str, int], int]
) -> None:
    """Only memory on the own GPU of another rank of the launch is misplaced."""
    found = node(ranks, {**held, ("GPU-0", 100): 40 * GIB})

    assert gpu_notes(found, "GPU-0") == ()
    assert [family.samples for family in misplaced_families(found, GPUS)] == [[]]


ALL_ON_FIRST = [on_first(number) for number in reversed(range(4))]
HELD_ON_FIRST = {("GPU-0", 100 + number): (10 + number) * GIB for number in range(4)}


@pytest.mark.parametrize("number", [0, 3])
def test_all_tensors_of_all_ranks_on_the_first_gpu(number: int) -> None:
    """Without set_device, every rank's report, the GPU, doctor and the series say who is there."""
    found = node(ALL_ON_FIRST, HELD_ON_FIRST)
    (item,) = (item for item in ALL_ON_FIRST if item.sample.process.rank == number)
    (family,) = misplaced_families(found, GPUS)
    rows = [(sample.labels, sample.value) for sample in family.samples]
    why = rank_why(found, item, item.sample.devices[0], may_look=True)
    (check,) = holders.checks({family.name: rows})

    told = (
        "Ranks 1, 2, 3 of run night hold 36.00 GiB here, on the GPU of rank 0, and nothing on "
        "another GPU."
    )
    (note,) = gpu_notes(found, "GPU-0")
    assert note.text == why.facts[0].text == told
    assert why.advice[0].kind == "set_device"
    assert note.remedy.startswith("Call torch.cuda.set_device(local_rank)")
    assert {labels["rank"]: value for labels, value in rows} == {
        str(number): float((10 + number) * GIB) for number in (1, 2, 3)
    }
    assert check.found == "rank 1, 2, 3 of night: 36.00 GiB on GPU 0"


@pytest.mark.parametrize(
    "ranks",
    [
        [on_first(number, visible=1) for number in range(4)],
        [on_first(number, visible=None) for number in range(4)],
        [on_first(number, index=1) for number in range(4)],
        [*map(on_first, range(4)), rank(4, "GPU-1")],
        [rank(number, "GPU-0", "GPU-1") for number in range(4)],
        [on_first(number, is_ranked=False) for number in range(4)],
        [on_first(0), replace(on_first(1), attributed=False)],
    ],
    ids=[
        "the only GPU",
        "unknown how many GPUs there are",
        "not the first GPU: the script chose it",
        "another rank has its own GPU",
        "each rank is on several GPUs",
        "programs without ranks",
        "not certain to be that process",
    ],
)
def test_ranks_that_share_a_gpu_on_purpose_are_not_told(ranks: Sequence[Published]) -> None:
    """Only ranks that each see a GPU of their own and use the first one alone are told."""
    found = node(ranks, HELD_ON_FIRST)

    assert gpu_notes(found, "GPU-0") == ()


def test_series_and_doctor() -> None:
    """Each rank has a series on the wrong GPU, and doctor adds them up."""
    (family,) = misplaced_families(node(EIGHT, {**ON_FIRST, **OWN}), GPUS)
    rows = [(sample.labels, sample.value) for sample in family.samples]
    (check,) = holders.checks({family.name: rows})

    assert {labels["gpu"] for labels, _ in rows} == {"0"}
    assert {labels["rank"]: value for labels, value in rows} == {
        str(number): float(CONTEXT) for number in range(1, 8)
    }
    assert check.found == "rank 1, 2, 3, 4, 5, 6, 7 of night: 3.42 GiB on GPU 0"
    assert (check.status, (check.next_step or "")[:27]) == (
        "problem",
        "Call torch.cuda.set_device(",
    )


def test_doctor_names_dead_memory() -> None:
    """A GPU whose memory dead processes hold is a problem; one without is none."""
    rows = [({"gpu": "0"}, 0.0), ({"gpu": "1"}, float(20 * GIB))]
    (check,) = holders.checks({"nvml_dead_process_memory_bytes": rows})

    assert check.found == "20.00 GiB of GPU 1 is held by them"
