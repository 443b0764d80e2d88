"""MIG: one GPU cut into GPU instances, each with compute instances. Handles die when it is cut anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchmem.exporter.nvml import memory
from torchmem.exporter.nvml.binding import Door, text
from torchmem.exporter.values import Mig, MigInstance


def read(door: Door, handle: Any) -> Mig | None:
    """Mode and instances; None on a GPU that cannot be cut."""
    mode = door.ask("nvmlDeviceGetMigMode", handle)
    if mode is None:
        return None
    found = [_instance(door, device) for device in devices(door, handle)] if mode[0] else []
    return Mig(bool(mode[0]), [instance for instance in found if instance is not None])


def is_enabled(door: Door, handle: Any) -> bool:
    """Whether the GPU is in MIG mode now."""
    mode = door.ask("nvmlDeviceGetMigMode", handle)
    return mode is not None and bool(mode[0])


def devices(door: Door, handle: Any) -> Iterator[Any]:
    """Handles of the MIG devices, that is compute instances; there can be gaps between their indices."""
    for index in range(door.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        device = door.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if device is not None:
            yield device


def uuid_of(door: Door, device: Any) -> str | None:
    """UUID of a MIG device."""
    return text(door.ask("nvmlDeviceGetUUID", device))


def _instance(door: Door, device: Any) -> MigInstance | None:
    """None for a device that was taken away since it was listed."""
    uuid = uuid_of(door, device)
    gpu_instance = door.ask("nvmlDeviceGetGpuInstanceId", device)
    compute_instance = door.ask("nvmlDeviceGetComputeInstanceId", device)
    if uuid is None or gpu_instance is None or compute_instance is None:
        return None
    # The name ends in the profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
    _, mark, profile = (text(door.ask("nvmlDeviceGetName", device)) or "").rpartition(" MIG ")
    return MigInstance(
        uuid, gpu_instance, compute_instance, profile if mark else None, memory.read(door, device)
    )
