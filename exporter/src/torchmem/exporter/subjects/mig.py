"""MIG: the instances that a GPU is partitioned into, and their memory.

The whole GPU keeps its own series. Handles of MIG devices become invalid when the GPU is
partitioned again, so the devices are listed in each reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuIdentity, GpuValue
from torchmem.exporter.nvml import NvmlDevice, plausible, text
from torchmem.exporter.reading import Reading
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.metrics import catalog
from torchmem.metrics.families import info, value_family

_MAX_DEVICES = 64  # of one GPU; the driver allows 7


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One compute instance, that is, one MIG device. `profile`: such as 1g.10gb.

    `memory` belongs to the GPU instance: all its compute instances report the same. So does
    `placement`: the ID of its profile, and where it starts; root alone may ask for it.
    """

    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str | None = None
    memory: MemoryInfo | None = None
    placement: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Mig(GpuValue):
    """Whether the GPU is in MIG mode, and its instances."""

    enabled: bool
    instances: Sequence[MigInstance] = ()

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Mig | None:
        """Call nvmlDeviceGetMigMode and, in MIG mode, read every MIG device."""
        mode = gpu.call_seldom("nvmlDeviceGetMigMode")
        if mode is None:
            return None
        instances = [_instance(gpu, device) for device in mig_devices(gpu)] if mode[0] else []
        return cls(bool(mode[0]), [instance for instance in instances if instance is not None])


def is_in_mig_mode(gpu: NvmlDevice) -> bool:
    """Whether the GPU is in MIG mode."""
    mode = gpu.call_seldom("nvmlDeviceGetMigMode")
    return mode is not None and bool(mode[0])


def mig_devices(gpu: NvmlDevice) -> Iterator[NvmlDevice]:
    """Yield the MIG devices of a GPU, one for each compute instance. Their indices have gaps."""
    count = plausible(gpu.call("nvmlDeviceGetMaxMigDeviceCount"), _MAX_DEVICES)
    for index in range(count or 0):
        handle = gpu.call("nvmlDeviceGetMigDeviceHandleByIndex", index)
        if handle is not None:
            yield NvmlDevice(gpu.nvml, handle)


def device_uuid(device: NvmlDevice) -> str | None:
    """Return the UUID of a MIG device."""
    return text(device.call("nvmlDeviceGetUUID"))


def gpus_by_mig_name(reading: Reading) -> Mapping[str, GpuIdentity]:
    """Return the GPU of each MIG device, by every name of the device."""
    gpus: dict[str, GpuIdentity] = {}
    for gpu, instance in _instances(reading):
        gpus |= dict.fromkeys(_names(gpu, instance), gpu)
    return gpus


def mig_names(reading: Reading) -> Mapping[str, tuple[str, str]]:
    """Return every name of each MIG device, by its UUID."""
    return {instance.uuid: _names(gpu, instance) for gpu, instance in _instances(reading)}


def families(reading: Reading) -> Iterator[Metric]:
    """Yield mode, instances, and the memory of each GPU instance once."""
    yield value_family(catalog.NVML_MIG_ENABLED, reading.read(Mig), lambda mig: mig.enabled)
    facts = [(_labels(gpu, instance), _facts(instance)) for gpu, instance in _instances(reading)]
    yield info(catalog.NVML_MIG_INFO, facts)
    rows = _memory(_instances(reading))
    yield value_family(catalog.NVML_MIG_MEMORY_TOTAL, rows, lambda memory: memory.total)
    yield value_family(catalog.NVML_MIG_MEMORY_USED, rows, lambda memory: memory.used)
    yield value_family(catalog.NVML_MIG_MEMORY_FREE, rows, lambda memory: memory.free)
    yield value_family(catalog.NVML_MIG_MEMORY_RESERVED, rows, lambda memory: memory.reserved)


def _instance(gpu: NvmlDevice, device: NvmlDevice) -> MigInstance | None:
    """Read one MIG device; None if it was removed after it was listed."""
    uuid = device_uuid(device)
    gpu_instance = device.call("nvmlDeviceGetGpuInstanceId")
    compute_instance = device.call("nvmlDeviceGetComputeInstanceId")
    if uuid is None or gpu_instance is None or compute_instance is None:
        return None
    # The name ends in the profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
    _, separator, profile = (text(device.call("nvmlDeviceGetName")) or "").rpartition(" MIG ")
    known = profile if separator else None
    memory, placement = MemoryInfo.read(device), gpu.seldom(_placement, gpu_instance)
    return MigInstance(uuid, gpu_instance, compute_instance, known, memory, placement)


def _placement(gpu: NvmlDevice, gpu_instance: int) -> tuple[int, int] | None:
    handle = gpu.call("nvmlDeviceGetGpuInstanceById", gpu_instance)
    known = gpu.nvml.call("nvmlGpuInstanceGetInfo", handle) if handle is not None else None
    return (known.profileId, known.placement.start) if known is not None else None


def _instances(reading: Reading) -> Iterator[tuple[GpuIdentity, MigInstance]]:
    for gpu, mig in reading.values(Mig):
        for instance in mig.instances:
            yield gpu, instance


def _names(gpu: GpuIdentity, instance: MigInstance) -> tuple[str, str]:
    """Return the device's names in CUDA_VISIBLE_DEVICES: UUID, and name before driver 470."""
    return instance.uuid, f"MIG-{gpu.uuid}/{instance.gpu_instance}/{instance.compute_instance}"


def _labels(gpu: GpuIdentity, instance: MigInstance) -> tuple[str, str, str, str]:
    return *gpu.labels, str(instance.gpu_instance), str(instance.compute_instance)


def _facts(instance: MigInstance) -> Mapping[str, str]:
    profile = {} if instance.profile is None else {"profile": instance.profile}
    return {"mig_uuid": instance.uuid, **profile}


def _memory(
    instances: Iterable[tuple[GpuIdentity, MigInstance]],
) -> list[tuple[tuple[str, str, str], MemoryInfo]]:
    """Return the memory of each GPU instance, however many compute instances share it."""
    memory = {
        (*gpu.labels, str(instance.gpu_instance)): instance.memory
        for gpu, instance in instances
        if instance.memory is not None
    }
    return list(memory.items())
