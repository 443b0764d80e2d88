"""Utilization of the GPU's engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.nvml import NvmlDevice, ratio
from torchmem.exporter.reading import Reading
from torchmem.metrics import catalog
from torchmem.metrics.families import keyed_family


@dataclass(frozen=True, slots=True)
class Utilization(GpuValue):
    """Ratio of the driver's last sampling period in which each engine was busy.

    gpu: a kernel ran; memory: device memory was read or written; the others are media engines.
    """

    gpu: float | None = None
    memory: float | None = None
    encoder: float | None = None
    decoder: float | None = None
    jpeg: float | None = None
    ofa: float | None = None

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Utilization:
        """Call nvmlDeviceGetUtilizationRates and the functions of the media engines (percent)."""
        rates = gpu.call("nvmlDeviceGetUtilizationRates")
        return cls(
            gpu=None if rates is None else ratio(rates.gpu),
            memory=None if rates is None else ratio(rates.memory),
            encoder=_engine(gpu, "nvmlDeviceGetEncoderUtilization"),
            decoder=_engine(gpu, "nvmlDeviceGetDecoderUtilization"),
            jpeg=_engine(gpu, "nvmlDeviceGetJpgUtilization"),
            ofa=_engine(gpu, "nvmlDeviceGetOfaUtilization"),
        )

    def ratios(self) -> Mapping[str, float | None]:
        """Return the ratios by engine."""
        return {
            "gpu": self.gpu,
            "memory": self.memory,
            "encoder": self.encoder,
            "decoder": self.decoder,
            "jpeg": self.jpeg,
            "ofa": self.ofa,
        }


def families(reading: Reading) -> Iterator[Metric]:
    """Yield the ratios by engine."""
    yield keyed_family(catalog.NVML_UTILIZATION, reading.read(Utilization), Utilization.ratios)


def _engine(gpu: NvmlDevice, name: str) -> float | None:
    """Read one media engine; the second value, its sampling period in microseconds, is not used."""
    utilization = gpu.call(name)
    return None if utilization is None else ratio(utilization[0])
