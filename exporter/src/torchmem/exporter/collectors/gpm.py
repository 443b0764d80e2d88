"""GPU performance monitoring: how much of the GPU was at work, as means since the previous scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family, known


def collect(reading: Reading) -> Iterator[Metric]:
    """Ratios and bytes per second; nothing on GPUs before Hopper."""
    rows = [(gpu.labels, means) for gpu, means in reading.each(reading.nvml.gpm)]
    yield family(catalog.NVML_SM_ACTIVE, known((labels, means.sm_active) for labels, means in rows))
    yield family(
        catalog.NVML_SM_OCCUPANCY, known((labels, means.sm_occupancy) for labels, means in rows)
    )
    yield family(
        catalog.NVML_TENSOR_ACTIVE, known((labels, means.tensor_active) for labels, means in rows)
    )
    yield family(
        catalog.NVML_DRAM_ACTIVE, known((labels, means.dram_active) for labels, means in rows)
    )
    nvlink = [
        ((*labels, way), rate) for labels, means in rows for way, rate in means.nvlink.directions()
    ]
    yield family(catalog.NVML_GPM_NVLINK, nvlink)
    pcie = [
        ((*labels, way), rate) for labels, means in rows for way, rate in means.pcie.directions()
    ]
    yield family(catalog.NVML_GPM_PCIE, pcie)
