"""GPU performance monitoring: hardware counters of Hopper and later, as means between two samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torchmem.exporter.nvml.binding import Door
from torchmem.exporter.values import Gpm, Transfer

SHORTEST_SECONDS = 1.0
LONGEST_SECONDS = 600.0
# What a value is divided by: dividing by 100 rounds once, and by a power of two not at all.
_PERCENT, _MEBIBYTE = 100, 1 / (1 << 20)
# nvmlGpmMetricId_t of nvml.h: NVML_GPM_METRIC_SM_UTIL, _SM_OCCUPANCY, _ANY_TENSOR_UTIL, _DRAM_BW_UTIL (percent),
# _PCIE_TX_PER_SEC, _PCIE_RX_PER_SEC, _NVLINK_TOTAL_RX_PER_SEC, _NVLINK_TOTAL_TX_PER_SEC (MiB/s).
_METRICS = {2: _PERCENT, 3: _PERCENT, 5: _PERCENT, 10: _PERCENT, 20: _MEBIBYTE, 21: _MEBIBYTE, 60: _MEBIBYTE,
            61: _MEBIBYTE}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Window:
    """The sample that the next window begins with, when it was taken, and what the last window gave."""

    sample: Any
    taken: float
    means: Gpm | None


class GpmWindows:
    """The newest sample of every GPU. A question that comes less than a second later gets the same answer."""

    def __init__(self, door: Door, clock: Callable[[], float] = time.monotonic) -> None:
        self._door = door
        self._clock = clock
        self._windows: dict[str, _Window | None] = {}

    def read(self, uuid: str, handle: Any) -> Gpm | None:
        """Means since the last sample; None without support, at first, and after ten minutes without a question."""
        if uuid not in self._windows and not self._supports(handle):
            self._windows[uuid] = None
        window = self._windows.get(uuid)
        if uuid in self._windows and window is None:
            return None
        now = self._clock()
        if window is not None and now - window.taken < SHORTEST_SECONDS:
            return window.means
        return self._next(uuid, handle, window, now)

    def forget_all_but(self, uuids: Collection[str]) -> None:
        """Free the samples of GPUs that are gone; all of them before NVML is shut down."""
        for uuid in [uuid for uuid in self._windows if uuid not in uuids]:
            self._free(self._windows.pop(uuid))

    def _supports(self, handle: Any) -> bool:
        support = self._door.ask("nvmlGpmQueryDeviceSupport", handle)
        return support is not None and bool(support.isSupportedDevice)

    def _next(self, uuid: str, handle: Any, window: _Window | None, now: float) -> Gpm | None:
        sample = self._take(handle)
        if sample is None:
            return None
        fresh = window is not None and now - window.taken <= LONGEST_SECONDS
        means = self._means(window.sample, sample) if window is not None and fresh else None
        following = _Window(sample, now, means)
        if self._windows.get(uuid) is not window:  # let go while a call hung
            self._free(following)
            return None
        self._windows[uuid] = following
        self._free(window)
        return means

    def _take(self, handle: Any) -> Any:
        sample = self._door.ask("nvmlGpmSampleAlloc")
        if sample is None:
            return None
        taken = None
        try:
            taken = self._door.ask("nvmlGpmSampleGet", handle, sample)
        finally:
            if taken is None:
                self._door.code_of("nvmlGpmSampleFree", sample)
        return taken

    def _means(self, first: Any, second: Any) -> Gpm | None:
        request = self._door.module.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = (
            self._door.module.NVML_GPM_METRICS_GET_VERSION,
            len(_METRICS),
        )
        request.sample1, request.sample2 = first, second
        for place, metric in enumerate(_METRICS):
            request.metrics[place].metricId = metric
        if self._door.ask("nvmlGpmMetricsGet", request) is None:
            return None
        sm, occupancy, tensor, dram, pcie_tx, pcie_rx, nvlink_rx, nvlink_tx = (
            _value(request.metrics[place], unit) for place, unit in enumerate(_METRICS.values())
        )
        return Gpm(
            sm, occupancy, tensor, dram, Transfer(nvlink_rx, nvlink_tx), Transfer(pcie_rx, pcie_tx)
        )

    def _free(self, window: _Window | None) -> None:
        if window is not None:
            self._door.code_of("nvmlGpmSampleFree", window.sample)


def _value(metric: Any, unit: float) -> float | None:
    """One mean in base units, if NVML gave it."""
    given = metric.nvmlReturn == 0 and math.isfinite(metric.value) and metric.value >= 0
    return metric.value / unit if given else None
