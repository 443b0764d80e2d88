"""What is read from PyTorch, by version and allocator backend, on fake torch modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.snapshots import segment
from support.torch_versions import UUIDS, Version, fake_torch

from torchmem.allocator.backend import Device
from torchmem.allocator.sizes import MIB
from torchmem.sdk.torch_backend import (
    AllocatorReader,
    backward_node,
    describe_device,
    device_uuid,
)

SEGMENTS = [dict(segment(1 << 40, "large", [(20 * MIB, "inactive")]))]
VERSIONS: list[Version] = [(2, 1), (2, 3), (2, 5), (2, 6), (2, 8), (2, 11), (2, 13)]


def stats(peak: int) -> dict[str, Any]:
    """Nested statistics in which every number is `peak`."""
    pools = {
        pool: {"current": peak, "peak": peak, "freed": peak}
        for pool in ("all", "small_pool", "large_pool")
    }
    names = (
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "requested_bytes",
        "inactive_split_bytes",
    )
    return dict.fromkeys(names, pools) | {"num_ooms": peak, "num_alloc_retries": peak}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_returns_its_segments(version: Version) -> None:
    """The snapshot call fits the version, and settings are known from 2.3 on."""
    torch = fake_torch(version, segments=SEGMENTS)
    reader = AllocatorReader(torch, {})

    assert (SEGMENTS, 1) == (reader.segments(), len(torch.snapshots))
    assert ("expandable_segments" in reader.settings()) == (version >= (2, 3))
    assert (None if version < (2, 6) else 0.5) == reader.fraction(0)


@pytest.mark.parametrize("version", VERSIONS)
def test_snapshots_pause_while_history_cannot_be_left_out(version: Version) -> None:
    """Before 2.11 a recorded history would be copied completely; since then it is left out."""
    torch = fake_torch(version, segments=SEGMENTS, recording=True)

    assert (AllocatorReader(torch, {}).segments() is not None) == (version >= (2, 11))
    assert (len(torch.snapshots) == 1) == (version >= (2, 11))


@pytest.mark.parametrize("version", VERSIONS)
def test_stacks_of_the_sdks_own_do_not_pause_snapshots(version: Version) -> None:
    """They leave at most one entry; with more, the script has put its own recording in place."""
    torch = fake_torch(version, segments=SEGMENTS, recording=True)
    reader = AllocatorReader(torch, {})
    reader.records_stacks = True
    torch.traces.append([{"action": "snapshot"}])
    assert SEGMENTS == reader.segments() == reader.segments()

    torch.traces[0].append({"action": "alloc"})
    assert SEGMENTS == reader.segments()
    assert (reader.segments() is not None) == (version >= (2, 11))


@pytest.mark.parametrize(
    ("functions", "name"),
    [
        ({}, None),
        ({"_current_graph_task_id": lambda: -1}, None),
        ({"_current_graph_task_id": lambda: 3}, ""),
        (
            {"_current_graph_task_id": lambda: 3, "_current_autograd_node": lambda: None},
            "",
        ),
        (
            {
                "_current_graph_task_id": lambda: 3,
                "_current_autograd_node": lambda: SimpleNamespace(name=lambda: "MmBackward0"),
            },
            "MmBackward0",
        ),
    ],
)
def test_the_backward_node(functions: dict[str, object], name: str | None) -> None:
    """Outside a backward pass there is none; where a version cannot name it, it has no name."""
    assert name == backward_node(SimpleNamespace(_C=SimpleNamespace(**functions)))


def test_settings_cost_no_snapshot_of_their_own() -> None:
    """They come with the newest snapshot; only the first call takes one."""
    torch = fake_torch(segments=SEGMENTS)
    reader = AllocatorReader(torch, {})

    assert reader.settings() == reader.settings()
    reader.segments()
    reader.settings()
    assert 2 == len(torch.snapshots)


def test_settings_are_what_was_parsed() -> None:
    """Settings missing in the snapshot come from the parsed string; unset ones are absent."""
    raw = {
        "PYTORCH_CUDA_ALLOC_CONF": (
            "large_segment_size_mb:40,max_split_size_mb:64,roundup_power2_divisions:[2:2]"
        ),
        "max_split_size": 64 * MIB,
        "expandable_segments": False,
        "max_cached_size": -1,
        "roundup_power2_divisions": {"1": 0, "2": 2},
    }

    expected = {
        "pytorch_cuda_alloc_conf": raw["PYTORCH_CUDA_ALLOC_CONF"],
        "large_segment_size_mb": "40",
        "max_split_size": str(64 * MIB),
        "expandable_segments": "False",
        "roundup_power2_divisions": "2:2",
        "backend": "native",
    }
    assert expected == AllocatorReader(fake_torch(settings=raw), {}).settings()


def test_other_backends_take_no_snapshot() -> None:
    """cudaMallocAsync and pluggable allocators would raise; only the backend's name is known."""
    for backend in ("cudaMallocAsync", "pluggable"):
        torch = fake_torch(backend=backend, segments=SEGMENTS)
        reader = AllocatorReader(torch, {})

        assert (None, {"backend": backend}, []) == (
            reader.segments(),
            reader.settings(),
            torch.snapshots,
        )


def test_cuda_malloc_async_keeps_three_totals() -> None:
    """Only `all` of allocated, active, and reserved bytes is kept; PyTorch's zeros are not."""
    kept = AllocatorReader(fake_torch(backend="cudaMallocAsync"), {}).kept_stats(stats(5))

    both = {"all": {"current": 5, "peak": 5}}
    assert {"allocated_bytes": both, "active_bytes": both, "reserved_bytes": both} == kept


@pytest.mark.parametrize(
    ("version", "variable", "caching", "peak", "known"),
    [
        ((2, 13), {}, True, 0, True),  # nothing allocated yet: true zeros
        ((2, 13), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, False, 0, False),
        ((2, 13), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, True, 5, True),  # 2.13 reads "0" as no
        (
            (2, 3),
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"},
            True,
            0,
            False,
        ),  # older ones read it as yes
        ((2, 13), {"PYTORCH_NO_HIP_MEMORY_CACHING": "1"}, False, 0, False),
        ((2, 13), {}, False, 0, False),  # torch.cuda.memory.caching_allocator_enable(False)
        ((2, 13), {}, False, 5, True),  # turned off later: what is cached is still counted
    ],
)
def test_zeros_of_a_cache_that_is_off_are_unknown(
    version: Version, variable: dict[str, str], caching: bool, peak: int, known: bool
) -> None:
    """Statistics and segments are unknown if allocations bypass a cache that was never used."""
    reader = AllocatorReader(
        fake_torch(version, segments=SEGMENTS if peak else (), caching=caching), variable
    )

    assert (known, known) == (
        reader.kept_stats(stats(peak)) is not None,
        reader.segments() is not None,
    )
    assert (not known) == (reader.settings().get("caching") == "False")


PLAIN = UUIDS[2].removeprefix("GPU-")
MIG = "MIG-4d2f1c7a-0000-4000-8000-00000000000a"
OLD_MIG = f"MIG-{UUIDS[1]}/3/0"
BARE = SimpleNamespace(name="NVIDIA A100", total_memory=40)


def uuid(
    properties: SimpleNamespace, visible: str | None = None, index: int = 0, order: str = ""
) -> str | None:
    """The UUID under a CUDA_VISIBLE_DEVICES; NVML has four cards, shifted by one from torch's."""
    environment = {"CUDA_DEVICE_ORDER": order} | (
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    )
    return device_uuid(
        fake_torch(nvml_index=lambda given: given + 1), index, properties, environment
    )


@pytest.mark.parametrize(
    "visible", [None, "", "2", "2,0", "1gpu2", UUIDS[2], "GPU-0000000", "2,2", "-1"]
)
def test_the_devices_own_property_is_used(visible: str | None) -> None:
    """From torch 2.5 on, it does not matter how the visible cards were chosen and ordered."""
    properties = SimpleNamespace(name="NVIDIA H100", uuid=PLAIN)

    assert UUIDS[2] == uuid(properties, visible) == uuid(properties, visible, order="PCI_BUS_ID")


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (MIG, 0, MIG),
        (f"{MIG}, {OLD_MIG}", 1, OLD_MIG),
        (f"{UUIDS[0]},{MIG}", 1, MIG),
        ("MIG-4d2f", 0, None),  # not the whole name
        (None, 0, None),  # the first slice was chosen by default: its name is unknown
    ],
)
def test_a_mig_slice_is_identified_by_the_environment(
    visible: str | None, index: int, expected: str | None
) -> None:
    """The property is not used, because the driver decides if it is the slice's or the card's."""
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid=PLAIN)

    assert expected == uuid(properties, visible, index)


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        (None, "PCI_BUS_ID", UUIDS[1]),
        ("0,1", "PCI_BUS_ID", UUIDS[1]),
        ("0,1", "", None),  # CUDA lists the fastest first, NVML by bus: unknown
        (UUIDS[3], "", UUIDS[3]),
        ("GPU-00000003", "", UUIDS[3]),
        ("GPU-0000000", "", None),  # a prefix of four cards
    ],
)
def test_without_the_property_only_certain_uuids_are_used(
    visible: str | None, order: str, expected: str | None
) -> None:
    """Up to torch 2.4: a UUID in the environment, or NVML's order where CUDA follows it."""
    assert expected == uuid(BARE, visible, order=order)


def test_a_single_card_needs_no_order() -> None:
    """On a machine with one card NVML's only UUID is used."""
    assert UUIDS[0] == device_uuid(
        fake_torch(cards=UUIDS[:1]), 0, BARE, {"CUDA_VISIBLE_DEVICES": "0"}
    )


def test_without_nvml_nothing_is_guessed() -> None:
    """If the library cannot be loaded, the UUID is unknown and nothing is raised."""
    torch = fake_torch(nvml=False)

    assert device_uuid(torch, 0, BARE, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) is None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            "33663530-3530-3631-3732-666331613633",
            "GPU-3f50506172fc1a63",
        ),  # sixteen digits as characters
        ("00000000-0000-0000-0000-000000000000", None),
        (None, None),
    ],
)
def test_rocm_uuids_are_rocminfos(own: str | None, expected: str | None) -> None:
    """ROCm's property holds characters; otherwise, or without it, the UUID is unknown."""
    properties = (
        SimpleNamespace(name="AMD Instinct MI300X")
        if own is None
        else SimpleNamespace(name="AMD", uuid=own)
    )

    assert expected == device_uuid(
        fake_torch(hip="6.2"), 0, properties, {"HIP_VISIBLE_DEVICES": "1"}
    )


def test_a_device_is_described_by_its_properties() -> None:
    """Name, UUID, and bytes are those of torch's index."""
    torch = fake_torch()
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        name="H100", uuid=PLAIN, total_memory=80
    )

    assert Device(1, UUIDS[2], "H100", 80) == describe_device(torch, 1, {})
