"""Which GPUs there are, and the versions of the driver."""

from __future__ import annotations

from typing import Any

from torchmem.exporter.gpu import GpuDownError, GpuFault, GpuIdentity, NvmlCallError
from torchmem.exporter.nvml.binding import Door, text
from torchmem.exporter.values import Versions

# nvmlComputeMode_t of nvml.h.
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_SWITCH = {0: "disabled", 1: "enabled"}


def versions(door: Door) -> Versions:
    """nvmlSystemGetDriverVersion, nvmlSystemGetNVMLVersion and nvmlSystemGetCudaDriverVersion (13000 means 13.0)."""
    cuda = door.ask_first(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
    return Versions(
        driver=text(door.ask("nvmlSystemGetDriverVersion")),
        nvml=text(door.ask("nvmlSystemGetNVMLVersion")),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


def gpu(door: Door, index: int, handles: dict[str, Any]) -> GpuIdentity | GpuFault:
    """The GPU at an NVML index; its handle is put into `handles` by UUID. Raises NvmlDownError."""
    try:
        handle = _certain(door, "nvmlDeviceGetHandleByIndex", index)
        uuid = str(text(_certain(door, "nvmlDeviceGetUUID", handle)))
        pci = door.ask("nvmlDeviceGetPciInfo", handle)
        found = GpuIdentity(
            index,
            uuid,
            name=text(door.ask("nvmlDeviceGetName", handle)),
            pci_bus_id=None if pci is None else text(pci.busId),
            driver_version=text(door.ask("nvmlSystemGetDriverVersion")),
            vbios_version=text(door.ask("nvmlDeviceGetVbiosVersion", handle)),
            compute_mode=_COMPUTE_MODES.get(door.ask("nvmlDeviceGetComputeMode", handle)),
            persistence_mode=_SWITCH.get(door.ask("nvmlDeviceGetPersistenceMode", handle)),
        )
    except (GpuDownError, NvmlCallError) as error:
        return GpuFault(index, error.code)
    handles[uuid] = handle
    return found


def _certain(door: Door, name: str, argument: Any) -> Any:
    """A value without which the GPU cannot be named: that it is not given is a fault too."""
    value, code = door.answer((name,), argument)
    if code:
        raise GpuDownError(code)
    return value
