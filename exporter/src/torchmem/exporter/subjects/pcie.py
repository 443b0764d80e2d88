"""The PCIe link: generation, width, replays, and throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import NvmlDevice, available, multiplied
from torchmem.metrics import catalog

_KILOBYTE = 1000  # the unit of nvmlDeviceGetPcieThroughput is KB/s
_TX, _RX = 0, 1  # nvmlPcieUtilCounter_t


@dataclass(frozen=True, slots=True)
class Traffic:
    """Received and transmitted bytes, or bytes per second."""

    rx: float | None = None
    tx: float | None = None

    def directions(self) -> Mapping[str, float | None]:
        """Return the values by direction."""
        return {"rx": self.rx, "tx": self.tx}


@dataclass(frozen=True, slots=True)
class Pcie(GpuValue):
    """Generation and width (lanes) of the link, current and maximum; replays since driver load."""

    generation: int | None = series(catalog.NVML_PCIE_GENERATION)
    max_generation: int | None = series(catalog.NVML_PCIE_MAX_GENERATION)
    width: int | None = series(catalog.NVML_PCIE_WIDTH)
    max_width: int | None = series(catalog.NVML_PCIE_MAX_WIDTH)
    replays: int | None = series(catalog.NVML_PCIE_REPLAYS)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Pcie:
        """Read the link and its replay counter."""
        return cls(
            generation=available(gpu.call("nvmlDeviceGetCurrPcieLinkGeneration")),
            max_generation=available(gpu.constant("nvmlDeviceGetMaxPcieLinkGeneration")),
            width=available(gpu.call("nvmlDeviceGetCurrPcieLinkWidth")),
            max_width=available(gpu.constant("nvmlDeviceGetMaxPcieLinkWidth")),
            replays=available(gpu.call_seldom("nvmlDeviceGetPcieReplayCounter")),
        )


@dataclass(frozen=True, slots=True)
class PcieThroughput(GpuValue):
    """Bytes per second over PCIe; collected only if the setting asks for it."""

    traffic: Traffic = series(
        catalog.NVML_PCIE_THROUGHPUT, Traffic.directions, default_factory=Traffic
    )

    @classmethod
    def read(cls, gpu: NvmlDevice) -> PcieThroughput:
        """Call nvmlDeviceGetPcieThroughput, which measures for 20 ms in each direction."""
        rx = multiplied(gpu.call("nvmlDeviceGetPcieThroughput", _RX), _KILOBYTE)
        tx = multiplied(gpu.call("nvmlDeviceGetPcieThroughput", _TX), _KILOBYTE)
        return cls(Traffic(rx, tx))
