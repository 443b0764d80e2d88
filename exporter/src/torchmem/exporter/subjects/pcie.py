"""The PCIe link: generation, width, replays, and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.nvml import NvmlDevice, available, multiplied
from torchmem.exporter.reading import Reading
from torchmem.metrics import catalog
from torchmem.metrics.families import keyed_family, value_family

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

    generation: int | None = None
    max_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    replays: int | None = None

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
    """Bytes per second over PCIe."""

    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> PcieThroughput:
        """Call nvmlDeviceGetPcieThroughput, which measures for 20 ms in each direction."""
        rx = multiplied(gpu.call("nvmlDeviceGetPcieThroughput", _RX), _KILOBYTE)
        tx = multiplied(gpu.call("nvmlDeviceGetPcieThroughput", _TX), _KILOBYTE)
        return cls(Traffic(rx, tx))


def families(reading: Reading) -> Iterator[Metric]:
    """Yield generation, width and replays."""
    rows = reading.read(Pcie)
    yield value_family(catalog.NVML_PCIE_GENERATION, rows, lambda pcie: pcie.generation)
    yield value_family(catalog.NVML_PCIE_MAX_GENERATION, rows, lambda pcie: pcie.max_generation)
    yield value_family(catalog.NVML_PCIE_WIDTH, rows, lambda pcie: pcie.width)
    yield value_family(catalog.NVML_PCIE_MAX_WIDTH, rows, lambda pcie: pcie.max_width)
    yield value_family(catalog.NVML_PCIE_REPLAYS, rows, lambda pcie: pcie.replays)


def throughput_families(reading: Reading) -> Iterator[Metric]:
    """Yield bytes per second by direction; collected only if the setting asks for it."""
    rows = reading.read(PcieThroughput)
    yield keyed_family(catalog.NVML_PCIE_THROUGHPUT, rows, lambda value: value.traffic.directions())
