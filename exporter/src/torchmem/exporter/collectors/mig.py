"""MIG: the instances a GPU is cut into, and their memory, beside the whole GPU's own series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.reading import Reading
from torchmem.exporter.values import MemoryInfo, Mig, MigInstance
from torchmem.sample import catalog
from torchmem.sample.families import family, info


def collect(reading: Reading) -> Iterator[Metric]:
    """Mode, instances, and the memory of each GPU instance once, however many compute instances share it."""
    found = reading.each(reading.nvml.mig)
    instances = [(gpu, instance) for gpu, mig in found for instance in mig.instances]
    reading.mig = {name: gpu for gpu, instance in instances for name in _names(gpu, instance)}
    reading.mig_names = {instance.uuid: _names(gpu, instance) for gpu, instance in instances}
    yield family(catalog.NVML_MIG_ENABLED, [(gpu.labels, float(mig.enabled)) for gpu, mig in found])
    yield info(
        catalog.NVML_MIG_INFO, [(_labels(gpu, item), _facts(item)) for gpu, item in instances]
    )
    rows = [
        ((*gpu.labels, str(number)), memory)
        for gpu, mig in found
        for number, memory in _memories(mig).items()
    ]
    yield family(catalog.NVML_MIG_MEMORY_TOTAL, [(labels, memory.total) for labels, memory in rows])
    yield family(catalog.NVML_MIG_MEMORY_USED, [(labels, memory.used) for labels, memory in rows])
    yield family(catalog.NVML_MIG_MEMORY_FREE, [(labels, memory.free) for labels, memory in rows])
    reserved = [(labels, memory.reserved) for labels, memory in rows if memory.reserved is not None]
    yield family(catalog.NVML_MIG_MEMORY_RESERVED, reserved)


def _names(gpu: GpuIdentity, instance: MigInstance) -> tuple[str, str]:
    """What CUDA_VISIBLE_DEVICES may call the MIG device: its UUID, or as drivers before 470 wrote it."""
    return instance.uuid, f"MIG-{gpu.uuid}/{instance.gpu_instance}/{instance.compute_instance}"


def _labels(gpu: GpuIdentity, instance: MigInstance) -> tuple[str, str, str, str]:
    return *gpu.labels, str(instance.gpu_instance), str(instance.compute_instance)


def _facts(instance: MigInstance) -> Mapping[str, str]:
    profile = {} if instance.profile is None else {"profile": instance.profile}
    return {"mig_uuid": instance.uuid, **profile}


def _memories(mig: Mig) -> dict[int, MemoryInfo]:
    return {item.gpu_instance: item.memory for item in mig.instances if item.memory is not None}
