"""Whether NVML and each GPU respond, which GPU is which, and the versions of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from torchmem.exporter import binding
from torchmem.exporter.gpus import GpuIdentity, GpuLabels, Versions
from torchmem.exporter.nvml import (
    GpuLostError,
    NvmlCallError,
    NvmlDevice,
    NvmlLibrary,
    text,
    text_field,
)
from torchmem.exporter.prices import GpuPrices, price_families
from torchmem.exporter.reading import Reading
from torchmem.metrics import catalog
from torchmem.metrics.families import family, info

_CUDA_VERSION = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
# nvmlComputeMode_t of nvml.h
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_PERSISTENCE_MODES = {0: "disabled", 1: "enabled"}


def read_versions(nvml: NvmlLibrary) -> Versions:
    """Read the versions; NVML's CUDA version 13000 means 13.0.

    Raises only NvmlDownError: a version that cannot be read is unknown.
    """
    cuda = _version(nvml, *_CUDA_VERSION)
    return Versions(
        driver=text(_version(nvml, "nvmlSystemGetDriverVersion")),
        nvml=text(_version(nvml, "nvmlSystemGetNVMLVersion")),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        outdated_binding=nvml.outdated_binding,
        platform="wsl" if nvml.is_wsl else None,
    )


def read_identity(
    nvml: NvmlLibrary, index: int, device: Callable[[str, Any], NvmlDevice]
) -> GpuIdentity:
    """Return the identity of the GPU at an NVML index; `device` returns it by UUID and handle.

    Raises NvmlDownError, GpuLostError or NvmlCallError, also if handle or UUID are unavailable. Any
    other fact that cannot be read is unknown.
    """
    handle = _require(nvml, "nvmlDeviceGetHandleByIndex", index)
    uuid = str(text(_require(nvml, "nvmlDeviceGetUUID", handle)))
    gpu = device(uuid, handle)
    pci = _constant(gpu, "nvmlDeviceGetPciInfo")
    compute_mode, persistence_mode = gpu.seldom(_modes)
    return GpuIdentity(
        index,
        uuid,
        name=text(_constant(gpu, "nvmlDeviceGetName")),
        pci_bus_id=None if pci is None else text_field(pci, "busId"),
        driver_version=text(_version(nvml, "nvmlSystemGetDriverVersion")),
        vbios_version=text(_constant(gpu, "nvmlDeviceGetVbiosVersion")),
        compute_mode=compute_mode,
        persistence_mode=persistence_mode,
    )


def _modes(gpu: NvmlDevice) -> tuple[str | None, str | None]:
    """Return the compute mode and the persistence mode, None also if a call fails."""
    compute = gpu.nvml.call_optional("nvmlDeviceGetComputeMode", gpu.handle)
    persistence = gpu.nvml.call_optional("nvmlDeviceGetPersistenceMode", gpu.handle)
    return _COMPUTE_MODES.get(compute), _PERSISTENCE_MODES.get(persistence)


def _constant(gpu: NvmlDevice, name: str) -> Any:
    """Return a constant of the GPU, None also if the call fails in an unexpected way."""
    try:
        return gpu.constant(name)
    except NvmlCallError:
        return None


def _version(nvml: NvmlLibrary, *names: str) -> Any:
    try:
        return nvml.constant(*names)
    except (GpuLostError, NvmlCallError):  # a code for a GPU has no meaning for the system
        return None


def families(
    reading: Reading, known: Mapping[str, GpuIdentity], prices: GpuPrices
) -> Iterator[Metric]:
    """Yield whether NVML and each GPU respond, their facts and their prices; read nothing.

    `known`: every GPU that was ever identified, by UUID. A GPU with a hung call does not respond.
    """
    is_outdated = reading.versions.outdated_binding is not None
    reason = reading.down_reason or (binding.REASON if is_outdated else "")
    yield family(catalog.NVML_UP, [((reason,), float(not reading.down_reason))])
    up = {
        **{gpu.labels: 1.0 for gpu in reading.present},
        **dict.fromkeys(sorted(reading.unresponsive), 0.0),
    }
    yield family(catalog.NVML_GPU_UP, up.items())
    yield family(catalog.NVML_GPU_ERROR, reading.lost.items())
    identities = _identities(reading, known)
    yield info(catalog.NVML_GPU_INFO, [(gpu.labels, _facts(gpu)) for gpu in identities])
    yield from price_families(prices, identities)
    versions = _version_facts(reading.versions)
    yield info(catalog.NVML_DRIVER_INFO, [((), versions)] if versions else [])


def _require(nvml: NvmlLibrary, name: str, argument: Any) -> Any:
    value, code = nvml.try_call(name, argument)
    nvml.check(name, code)
    if code:
        raise GpuLostError(code)
    return value


def _identities(reading: Reading, known: Mapping[str, GpuIdentity]) -> list[GpuIdentity]:
    present: dict[GpuLabels, GpuIdentity] = {gpu.labels: gpu for gpu in reading.present}
    unresponsive = reading.unresponsive
    remembered = {gpu.labels: gpu for gpu in known.values() if gpu.labels in unresponsive}
    return list((present | remembered).values())


def _facts(gpu: GpuIdentity) -> dict[str, str]:
    return _known(
        {
            "name": gpu.name,
            "pci_bus_id": gpu.pci_bus_id,
            "driver_version": gpu.driver_version,
            "vbios_version": gpu.vbios_version,
            "compute_mode": gpu.compute_mode,
            "persistence_mode": gpu.persistence_mode,
        }
    )


def _version_facts(versions: Versions) -> dict[str, str]:
    return _known(
        {
            "driver_version": versions.driver,
            "nvml_version": versions.nvml,
            "cuda_version": versions.cuda,
            "platform": versions.platform,
        }
    )


def _known(facts: Mapping[str, str | None]) -> dict[str, str]:
    return {name: fact for name, fact in facts.items() if fact is not None}
