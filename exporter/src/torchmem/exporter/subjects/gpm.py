"""GPU performance monitoring (GPM): hardware counters as means since the last scrape.

Available on Hopper and newer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torchmem.exporter.gpus import GpuValue, series
from torchmem.exporter.nvml import DeviceState, NvmlDevice, NvmlLibrary
from torchmem.exporter.subjects.pcie import Traffic
from torchmem.metrics import catalog

MIN_WINDOW_SECONDS = 1.0
MAX_WINDOW_SECONDS = 600.0
# What a value is divided by: dividing by 100 rounds once, and by a power of two not at all.
_PERCENT, _MEBIBYTE = 100, 1 / (1 << 20)
_METRICS = {  # nvmlGpmMetricId_t of nvml.h
    2: _PERCENT,  # NVML_GPM_METRIC_SM_UTIL
    3: _PERCENT,  # NVML_GPM_METRIC_SM_OCCUPANCY
    5: _PERCENT,  # NVML_GPM_METRIC_ANY_TENSOR_UTIL
    10: _PERCENT,  # NVML_GPM_METRIC_DRAM_BW_UTIL
    20: _MEBIBYTE,  # NVML_GPM_METRIC_PCIE_TX_PER_SEC
    21: _MEBIBYTE,  # NVML_GPM_METRIC_PCIE_RX_PER_SEC
    60: _MEBIBYTE,  # NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC
    61: _MEBIBYTE,  # NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC
}


@dataclass(frozen=True, slots=True)
class Gpm(GpuValue):
    """Means between two samples: ratios, and bytes per second."""

    sm_active: float | None = series(catalog.NVML_SM_ACTIVE)
    sm_occupancy: float | None = series(catalog.NVML_SM_OCCUPANCY)
    tensor_active: float | None = series(catalog.NVML_TENSOR_ACTIVE)
    dram_active: float | None = series(catalog.NVML_DRAM_ACTIVE)
    nvlink: Traffic = series(catalog.NVML_GPM_NVLINK, Traffic.directions, default_factory=Traffic)
    pcie: Traffic = series(catalog.NVML_GPM_PCIE, Traffic.directions, default_factory=Traffic)

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Gpm | None:
        """Return the means since the last reading.

        None without support, in the first reading, and after ten minutes without a reading.
        """
        return gpu.state(_Window).means(gpu)


class _Window(DeviceState):
    """The newest sample of a GPU, where the next window begins, and the means of the last window.

    A reading less than a second after the last one returns the same means.
    """

    def __init__(self) -> None:
        self._is_supported: bool | None = None
        self._is_released = False
        self._sample: Any = None
        self._sample_seconds = 0.0
        self._means: Gpm | None = None

    def means(self, gpu: NvmlDevice) -> Gpm | None:
        """Take a sample and return the means since the previous one."""
        if self._is_supported is None:
            self._is_supported = _is_supported(gpu)
        if not self._is_supported:
            return None
        now = gpu.nvml.monotonic()
        age = now - self._sample_seconds
        if self._sample is not None and age < MIN_WINDOW_SECONDS:
            return self._means
        sample = _take_sample(gpu)
        if sample is None:
            return None
        has_begun = self._sample is not None and age <= MAX_WINDOW_SECONDS
        try:
            means = _means(gpu.nvml, self._sample, sample) if has_begun else None
        except Exception:
            _free(gpu.nvml, sample)
            raise
        return self._advance(gpu.nvml, sample, now, means)

    def release(self, nvml: NvmlLibrary) -> None:
        """Free the sample."""
        self._is_released = True
        self._replace(nvml, None)

    def _advance(self, nvml: NvmlLibrary, sample: Any, now: float, means: Gpm | None) -> Gpm | None:
        if self._is_released:  # while a call was hanging
            _free(nvml, sample)
            return None
        self._sample_seconds, self._means = now, means
        self._replace(nvml, sample)
        return means

    def _replace(self, nvml: NvmlLibrary, sample: Any) -> None:
        previous, self._sample = self._sample, sample
        if previous is not None:
            _free(nvml, previous)


def _is_supported(gpu: NvmlDevice) -> bool:
    support = gpu.call("nvmlGpmQueryDeviceSupport")
    return support is not None and bool(support.isSupportedDevice)


def _take_sample(gpu: NvmlDevice) -> Any:
    sample = gpu.nvml.call("nvmlGpmSampleAlloc")
    if sample is None:
        return None
    taken = None
    try:
        taken = gpu.call("nvmlGpmSampleGet", sample)
    finally:
        if taken is None:
            _free(gpu.nvml, sample)
    return taken


def _free(nvml: NvmlLibrary, sample: Any) -> None:
    nvml.try_call("nvmlGpmSampleFree", sample)


def _means(nvml: NvmlLibrary, first: Any, second: Any) -> Gpm | None:
    request = nvml.module.c_nvmlGpmMetricsGet_t()
    request.version = nvml.module.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(_METRICS)
    request.sample1, request.sample2 = first, second
    for place, metric in enumerate(_METRICS):
        request.metrics[place].metricId = metric
    if nvml.call("nvmlGpmMetricsGet", request) is None:
        return None
    sm, occupancy, tensor, dram, pcie_tx, pcie_rx, nvlink_rx, nvlink_tx = (
        _mean(request.metrics[place], unit) for place, unit in enumerate(_METRICS.values())
    )
    return Gpm(
        sm, occupancy, tensor, dram, Traffic(nvlink_rx, nvlink_tx), Traffic(pcie_rx, pcie_tx)
    )


def _mean(metric: Any, unit: float) -> float | None:
    """Return one mean in base units, None if NVML did not provide it."""
    valid = metric.nvmlReturn == 0 and math.isfinite(metric.value) and metric.value >= 0
    return metric.value / unit if valid else None
