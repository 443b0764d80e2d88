"""Which GPU torch's device is, by version of torch and environment, on fake torch modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.torch_versions import UUIDS, fake_torch

from torchmem.allocator.backend import Device
from torchmem.sdk.pytorch.device_uuid import describe_device, device_uuid

PLAIN = UUIDS[2].removeprefix("GPU-")
MIG = "MIG-4d2f1c7a-0000-4000-8000-00000000000a"
OLD_MIG = f"MIG-{UUIDS[1]}/3/0"
BARE = SimpleNamespace(name="NVIDIA A100", total_memory=40)


def uuid(
    properties: SimpleNamespace, visible: str | None = None, index: int = 0, order: str = ""
) -> str | None:
    """The UUID under a CUDA_VISIBLE_DEVICES; NVML has four GPUs, shifted by one from torch's."""
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
    """From torch 2.5 on, it does not matter how the visible GPUs were chosen and ordered."""
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
    """The property is not used, because the driver decides if it is the slice's or the GPU's."""
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid=PLAIN)

    assert uuid(properties, visible, index) == expected


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        (None, "PCI_BUS_ID", UUIDS[1]),
        ("0,1", "PCI_BUS_ID", UUIDS[1]),
        ("0,1", "", None),  # CUDA lists the fastest first, NVML by bus: unknown
        (UUIDS[3], "", UUIDS[3]),
        ("GPU-00000003", "", UUIDS[3]),
        ("GPU-0000000", "", None),  # a prefix of four GPUs
    ],
)
def test_without_the_property_only_certain_uuids_are_used(
    visible: str | None, order: str, expected: str | None
) -> None:
    """Up to torch 2.4: a UUID in the environment, or NVML's order where CUDA follows it."""
    assert uuid(BARE, visible, order=order) == expected


def test_a_single_gpu_needs_no_order() -> None:
    """On a machine with one GPU NVML's only UUID is used."""
    assert UUIDS[0] == device_uuid(
        fake_torch(gpus=UUIDS[:1]), 0, BARE, {"CUDA_VISIBLE_DEVICES": "0"}
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

    assert (
        device_uuid(fake_torch(hip="6.2"), 0, properties, {"HIP_VISIBLE_DEVICES": "1"}) == expected
    )


def test_a_device_is_described_by_its_properties() -> None:
    """Name, UUID, and bytes are those of torch's index; so is how many devices there are."""
    torch = fake_torch()
    torch.cuda.mem_get_info = lambda index: (0, 80)
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        name="H100", uuid=PLAIN, total_memory=80
    )

    known = Device(1, UUIDS[2], "H100", 80, visible_devices=8)
    assert known == describe_device(torch, 1, {})
