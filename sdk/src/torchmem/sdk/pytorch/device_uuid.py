"""Which GPU torch's device is: its UUID as NVML or rocminfo writes it, by version of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torchmem.allocator.backend import Device
from torchmem.sdk.pytorch.device_memory import shares_host_memory, total_bytes
from torchmem.sdk.safety.interruptions import ignore, is_interruption

_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_GPU = f"GPU-{_UUID}"
# A compute instance, in the form of drivers from 470 on, and of older ones.
_MIG = rf"MIG-({_UUID}|GPU-{_UUID}/\d+/\d+)"


def describe_device(torch: Any, index: int, environment: Mapping[str, str]) -> Device:
    """Return what is known of torch's device `index`, on which there is a context."""
    properties = torch.cuda.get_device_properties(index)
    uuid = device_uuid(torch, index, properties, environment)
    total = total_bytes(torch, index, properties)
    is_shared, visible = shares_host_memory(properties), torch.cuda.device_count()
    return Device(index, uuid, str(properties.name), total, is_shared, visible)


def device_uuid(
    torch: Any, index: int, properties: Any, environment: Mapping[str, str]
) -> str | None:
    """Return the UUID as NVML or rocminfo writes it, or None if it could be another GPU's.

    A MIG slice is identified by CUDA_VISIBLE_DEVICES alone. Otherwise the device's own property
    (since torch 2.5) is right under every CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = entries[index] if index < len(entries) else ""
    if entry.startswith("MIG-") or " MIG " in str(properties.name):
        return entry if re.fullmatch(_MIG, entry) else None
    own = getattr(properties, "uuid", None)
    if getattr(torch.version, "hip", None):
        return None if own is None else _hip_uuid(str(own))
    if own is not None:
        return f"GPU-{str(own).removeprefix('GPU-')}"
    return entry if re.fullmatch(_GPU, entry) else _uuid_by_index(torch, index, entry, environment)


def _hip_uuid(text: str) -> str | None:
    """Convert torch's UUID of a ROCm device to rocminfo's 16 digits.

    HIP keeps these digits as characters, and torch writes the bytes of those in hexadecimal.
    """
    with ignore(ValueError):
        digits = bytes.fromhex(text.replace("-", "")).decode("ascii")
        return f"GPU-{digits}" if re.fullmatch("[0-9a-f]{16}", digits) else None
    return None


def _uuid_by_index(
    torch: Any, index: int, entry: str, environment: Mapping[str, str]
) -> str | None:
    """Look the UUID up in NVML's list, before torch 2.5, if its order is CUDA's or irrelevant."""
    try:
        uuids: list[str] = torch.cuda._raw_device_uuid_nvml() or []  # noqa: SLF001
        if len(uuids) == 1:
            return uuids[0]
        if entry.startswith("GPU-"):
            matches = [uuid for uuid in uuids if uuid.startswith(entry)]
            return matches[0] if len(matches) == 1 else None
        if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return uuids[int(torch.cuda._get_nvml_device_index(index))]  # noqa: SLF001
    except Exception as error:
        if is_interruption(error):
            raise
    return None
