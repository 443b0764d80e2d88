"""The PCIe link: what it is, what it could be, and how often it had to send again."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family, known


def collect(reading: Reading) -> Iterator[Metric]:
    """Generation, width and replays."""
    rows = [(gpu.labels, link) for gpu, link in reading.each(reading.nvml.pcie)]
    yield family(
        catalog.NVML_PCIE_GENERATION, known((labels, link.generation) for labels, link in rows)
    )
    yield family(
        catalog.NVML_PCIE_MAX_GENERATION,
        known((labels, link.max_generation) for labels, link in rows),
    )
    yield family(catalog.NVML_PCIE_WIDTH, known((labels, link.width) for labels, link in rows))
    yield family(
        catalog.NVML_PCIE_MAX_WIDTH, known((labels, link.max_width) for labels, link in rows)
    )
    yield family(catalog.NVML_PCIE_REPLAYS, known((labels, link.replays) for labels, link in rows))


def collect_throughput(reading: Reading) -> Iterator[Metric]:
    """Bytes per second by direction; NVML measures 20 ms for each, so this is asked only when it is wanted."""
    found = reading.each(reading.nvml.pcie_throughput)
    rows = [
        ((*gpu.labels, direction), rate)
        for gpu, rates in found
        for direction, rate in rates.directions()
    ]
    yield family(catalog.NVML_PCIE_THROUGHPUT, rows)
