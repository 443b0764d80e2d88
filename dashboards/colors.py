"""When a value is green, orange or red: the thresholds of the alerts, as Grafana's thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.explain import thresholds
from torchmem.metrics.colors import ATTENTION, FAILED, GOOD

_VALUES = thresholds.defaults().values

Steps = list[tuple[float | None, str]]
"""The colors that apply from each value on; the first value is None."""


def threshold(name: str) -> float:
    """Return a threshold of the shipped alerts, by its name in explain/thresholds.yml."""
    return float(_VALUES[name])


@dataclass(frozen=True, slots=True)
class Levels:
    """From which value on a number needs attention, and from which it has failed.

    With `falling`, low values are the bad ones. A missing level does not exist.
    """

    attention: float | None = None
    failed: float | None = None
    falling: bool = False

    def steps(self) -> Steps:
        """Return the colors in ascending order of the values."""
        if not self.falling:
            pairs = ((self.attention, ATTENTION), (self.failed, FAILED))
            return [(None, GOOD), *((value, color) for value, color in pairs if value is not None)]
        bounds = [(value, color) for value, color in self._falling() if value is not None]
        colors = [color for _, color in bounds] + [GOOD]
        return [(None, colors[0]), *zip([value for value, _ in bounds], colors[1:], strict=True)]

    def _falling(self) -> tuple[tuple[float | None, str], ...]:
        return (self.failed, FAILED), (self.attention, ATTENTION)


ANY_IS_WRONG = Levels(attention=1)
ANY_HAS_FAILED = Levels(failed=1)
STRANDED = Levels(threshold("stranded_ratio"), threshold("critical_stranded_ratio"))
HEADROOM = Levels(
    threshold("near_capacity_ratio"), threshold("critical_headroom_ratio"), falling=True
)
FRAGMENTATION = Levels(threshold("fragmentation_ratio"))
WAKE_MARGIN = Levels(failed=0, falling=True)
HOST_AVAILABLE = Levels(threshold("host_available_ratio"), falling=True)
EXHAUSTION = Levels(threshold("exhaustion_seconds"), falling=True)
RETRIES_PER_MINUTE = Levels(threshold("retries_per_minute"))
IMBALANCE = Levels(threshold("imbalance_factor"))
SDK_COST = Levels(threshold("sdk_cpu_ratio"))

_FULL, _ALMOST_FULL = 1 - threshold("critical_headroom_ratio"), 1 - threshold("near_capacity_ratio")
MEMORY_USED = Levels(_ALMOST_FULL, _FULL)
GPU_UTILIZATION = Levels(threshold("gpu_idle_utilization_ratio"), falling=True)
# NVML's thresholds gpu_max and slowdown of an H100, near those of other GPUs. No alert uses a
# temperature: a GPU that is too hot lowers its clocks, and then TorchmemGpuThrottled fires.
GPU_TEMPERATURE = Levels(87, 89)
# At its power limit a GPU lowers its clocks, which is usual under load.
GPU_POWER = Levels()
