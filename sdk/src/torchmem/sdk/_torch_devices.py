"""Which physical GPU a torch device is. The torch module is passed by argument; every call needs CUDA to be up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchmem.core.backend import Device

_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_GPU = re.compile(f"GPU-{_UUID}")
# A compute instance, as drivers from 470 on write it, and as older ones did.
_MIG = re.compile(rf"MIG-({_UUID}|GPU-{_UUID}/\d+/\d+)")


def describe(torch: Any, index: int, environment: Mapping[str, str]) -> Device:
    """Name, UUID and bytes of torch's device `index`, from its own properties."""
    properties = torch.cuda.get_device_properties(index)
    uuid = device_uuid(torch, index, properties, environment)
    return Device(index, uuid, str(properties.name), int(properties.total_memory))


def device_uuid(torch: Any, index: int, properties: Any, environment: Mapping[str, str]) -> str | None:
    """The UUID as NVML, or rocminfo, writes it; None rather than one that might be another card's.

    A MIG slice is named by CUDA_VISIBLE_DEVICES alone. Otherwise the device's own property (since torch 2.5) is right
    under every CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    entries = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = entries[index] if index < len(entries) else ""
    if entry.startswith("MIG-") or " MIG " in str(properties.name):
        return entry if _MIG.fullmatch(entry) else None
    own = getattr(properties, "uuid", None)
    if getattr(torch.version, "hip", None):
        return None if own is None else _hip_uuid(str(own))
    if own is not None:
        return f"GPU-{str(own).removeprefix('GPU-')}"
    return entry if _GPU.fullmatch(entry) else _uuid_by_index(torch, index, entry, environment)


def _hip_uuid(text: str) -> str | None:
    """HIP keeps the 16 digits that rocminfo shows as characters, and torch writes the bytes of those in hexadecimal."""
    with suppress(ValueError):
        digits = bytes.fromhex(text.replace("-", "")).decode("ascii")
        return f"GPU-{digits}" if re.fullmatch("[0-9a-f]{16}", digits) else None
    return None


def _uuid_by_index(torch: Any, index: int, entry: str, environment: Mapping[str, str]) -> str | None:
    """Before torch 2.5: through NVML's list, where its order is CUDA's or does not matter."""
    with suppress(Exception):
        uuids: list[str] = torch.cuda._raw_device_uuid_nvml() or []  # noqa: SLF001
        if len(uuids) == 1:
            return uuids[0]
        if entry.startswith("GPU-"):
            matches = [uuid for uuid in uuids if uuid.startswith(entry)]
            return matches[0] if len(matches) == 1 else None
        if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return uuids[int(torch.cuda._get_nvml_device_index(index))]  # noqa: SLF001
    return None
