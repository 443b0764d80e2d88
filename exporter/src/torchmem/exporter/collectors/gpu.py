"""Whether NVML and each GPU answer, and which is which. Asks nothing itself: it tells how the reading went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuIdentity, GpuLabels
from torchmem.exporter.reading import Reading
from torchmem.exporter.values import Versions
from torchmem.sample import catalog
from torchmem.sample.families import family, info


def collect(reading: Reading, known: Mapping[str, GpuIdentity]) -> Iterator[Metric]:
    """`known` holds every GPU ever seen; one whose call hangs, now or since before, counts as not answering."""
    yield family(catalog.NVML_UP, [((reading.reason,), float(not reading.reason))])
    answers = {
        **{gpu.labels: 1.0 for gpu in reading.present},
        **dict.fromkeys(sorted(reading.silent), 0.0),
    }
    yield family(catalog.NVML_GPU_UP, answers.items())
    codes = [(labels, float(code)) for labels, code in reading.lost.items() if code is not None]
    yield family(catalog.NVML_GPU_ERROR, codes)
    yield info(
        catalog.NVML_GPU_INFO, [(gpu.labels, _facts(gpu)) for gpu in _identities(reading, known)]
    )
    versions = _versions(reading.versions)
    yield info(catalog.NVML_DRIVER_INFO, [((), versions)] if versions else [])


def _identities(reading: Reading, known: Mapping[str, GpuIdentity]) -> list[GpuIdentity]:
    present: dict[GpuLabels, GpuIdentity] = {gpu.labels: gpu for gpu in reading.present}
    silent = reading.silent
    remembered = {gpu.labels: gpu for gpu in known.values() if gpu.labels in silent}
    return list((present | remembered).values())


def _facts(gpu: GpuIdentity) -> dict[str, str]:
    facts = {
        "name": gpu.name,
        "pci_bus_id": gpu.pci_bus_id,
        "driver_version": gpu.driver_version,
        "vbios_version": gpu.vbios_version,
        "compute_mode": gpu.compute_mode,
        "persistence_mode": gpu.persistence_mode,
    }
    return _given(facts)


def _versions(versions: Versions) -> dict[str, str]:
    return _given(
        {
            "driver_version": versions.driver,
            "nvml_version": versions.nvml,
            "cuda_version": versions.cuda,
        }
    )


def _given(facts: Mapping[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in facts.items() if text is not None}
