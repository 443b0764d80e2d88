"""The PCIe link: generation, width, replays, and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.nvml import Device, available, multiplied
from torchmem.exporter.reading import Reading, by_key
from torchmem.sample import catalog
from torchmem.sample.families import family, known

_KILOBYTE = 1000  # the unit of nvmlDeviceGetPcieThroughput is KB/s
_TX, _RX = 0, 1  # nvmlPcieUtilCounter_t


@dataclass(frozen=True, slots=True)
class Traffic:
    """Received and transmitted bytes, or bytes per second."""

    rx: float | None = None
    tx: float | None = None

    def directions(self) -> Mapping[str, float]:
        """Return the known values by direction."""
        values = {"rx": self.rx, "tx": self.tx}
        return {direction: value for direction, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Pcie(GpuValue):
    """Generation and width (lanes) of the link, current and maximum; replays since driver load."""

    generation: int | None = None
    max_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    replays: int | None = None

    @classmethod
    def read(cls, gpu: Device) -> Pcie:
        """Read the link and its replay counter."""
        return cls(
            generation=available(gpu.call("nvmlDeviceGetCurrPcieLinkGeneration")),
            max_generation=available(gpu.call("nvmlDeviceGetMaxPcieLinkGeneration")),
            width=available(gpu.call("nvmlDeviceGetCurrPcieLinkWidth")),
            max_width=available(gpu.call("nvmlDeviceGetMaxPcieLinkWidth")),
            replays=available(gpu.call("nvmlDeviceGetPcieReplayCounter")),
        )


@dataclass(frozen=True, slots=True)
class PcieThroughput(GpuValue):
    """Bytes per second over PCIe."""

    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def read(cls, gpu: Device) -> PcieThroughput:
        """Call nvmlDeviceGetPcieThroughput, which measures for 20 ms in each direction."""
        rx = multiplied(gpu.call("nvmlDeviceGetPcieThroughput", _RX), _KILOBYTE)
        tx = multiplied(gpu.call("nvmlDeviceGetPcieThroughput", _TX), _KILOBYTE)
        return cls(Traffic(rx, tx))


def families(reading: Reading) -> Iterator[Metric]:
    """Yield generation, width and replays."""
    rows = reading.read(Pcie)
    generation = known((labels, pcie.generation) for labels, pcie in rows)
    yield family(catalog.NVML_PCIE_GENERATION, generation)
    max_generation = known((labels, pcie.max_generation) for labels, pcie in rows)
    yield family(catalog.NVML_PCIE_MAX_GENERATION, max_generation)
    yield family(catalog.NVML_PCIE_WIDTH, known((labels, pcie.width) for labels, pcie in rows))
    max_width = known((labels, pcie.max_width) for labels, pcie in rows)
    yield family(catalog.NVML_PCIE_MAX_WIDTH, max_width)
    yield family(catalog.NVML_PCIE_REPLAYS, known((labels, pcie.replays) for labels, pcie in rows))


def throughput_families(reading: Reading) -> Iterator[Metric]:
    """Yield bytes per second by direction; collected only if the setting asks for it."""
    rows = reading.read(PcieThroughput)
    rates = by_key((labels, throughput.traffic.directions()) for labels, throughput in rows)
    yield family(catalog.NVML_PCIE_THROUGHPUT, rates)
