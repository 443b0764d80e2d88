"""A simulated H100: what NVML reports about it, given how busy it was and how it is cooled.

Limits are those of the H100 SXM5 80 GB: power, memory bandwidth, NVLink and PCIe from NVIDIA's data
sheet (2023); clocks, temperature thresholds and idle values as `nvidia-smi -q` prints them for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

from torchmem.demo.activity import Activity
from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.subjects import clocks
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.gpm import Gpm
from torchmem.exporter.subjects.memory import Bar1, UnifiedMemory
from torchmem.exporter.subjects.nvlink import NvLink
from torchmem.exporter.subjects.pcie import Pcie, PcieThroughput, Traffic
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.temperature import Temperatures
from torchmem.exporter.subjects.utilization import Utilization

IDLE_WATTS, LIMIT_WATTS = 72.0, 700.0
IDLE_HERTZ, MAX_HERTZ = 345e6, {"graphics": 1980e6, "sm": 1980e6, "memory": 2619e6, "video": 1545e6}
THRESHOLDS = {"shutdown": 92, "slowdown": 89, "memory_max": 95, "gpu_max": 87}
LINKS = 18
BAR1_BYTES = 128 << 30
INLET_CELSIUS = 27.0
HEAT_SECONDS = 45.0
"""Time constant with which the temperature of an air-cooled GPU follows its power."""
NVLINK_BYTES_PER_SECOND = 65e9
"""Traffic of a busy GPU in each direction; the links carry at most 450 GB/s."""
LOADED_BYTES_PER_SECOND = 1.6e9
"""Batches over PCIe of a busy GPU; the bus carries at most 64 GB/s."""

REASONS = tuple(clocks.REASONS)
LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")
_CORRECTED_SECONDS = 900.0  # of work between two corrected errors
_REPLAY_SECONDS = 20.0  # of work between two replays of a faulty link
_DEFECTS: Mapping[int, Mapping[str, Any]] = {
    1: {"corrects_errors": True},
    3: {"kelvin_per_watt": 0.094},
    4: {"remapped_at": 600.0},
    6: {"faulty_link": True},
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What distinguishes one GPU from another.

    `demand_watts`: power of full work at full clocks; above the limit the driver lowers the clocks.
    `kelvin_per_watt`: how well it is cooled. `joules`: energy counter at time 0. The flags are
    defects: memory whose errors ECC corrects, a row that is remapped at `remapped_at` (seconds),
    and a link that sends packets again.
    """

    demand_watts: float
    kelvin_per_watt: float
    joules: float
    phase: float
    corrects_errors: bool = False
    remapped_at: float = math.inf
    faulty_link: bool = False

    @classmethod
    def healthy(cls, index: int, seed: int) -> Traits:
        """Return the traits of a GPU without defects, by its NVML index."""
        random = Random(f"{seed}:gpu:{index}")  # noqa: S311 -- a simulation, not a secret
        return cls(
            demand_watts=random.uniform(650, 775),
            kelvin_per_watt=random.uniform(0.047, 0.058),
            joules=random.uniform(0.8e9, 1.1e9),
            phase=random.random(),
        )

    @classmethod
    def of(cls, index: int, seed: int) -> Traits:
        """Return the traits of a GPU by its NVML index.

        GPU 1 corrects memory errors, 3 is cooled badly, 4 remaps a row, and 6 has a faulty link.
        """
        return replace(cls.healthy(index, seed), **_DEFECTS.get(index, {}))


class GpuMoment:
    """One GPU at one time, with `peers` other GPUs with which it exchanges gradients."""

    def __init__(self, traits: Traits, activity: Activity, at: float, peers: int) -> None:
        self._traits, self._at = traits, at
        self._has_peers = peers > 0
        self._worked = activity.worked(at)
        level = activity.level(at)
        self.busy = level * min(1.0, 0.97 + 0.03 * self._wave(97)) if level else 0.0
        demand = IDLE_WATTS + self.busy * (traits.demand_watts - IDLE_WATTS + 8 * self._wave(311))
        self._cap = min(1.0, LIMIT_WATTS / demand)
        self._warmth = activity.smoothed(at, HEAT_SECONDS)
        self._slowdown = min(1.0, self._headroom_celsius() / self._rise())
        worked = (demand * self._cap - IDLE_WATTS) * self._slowdown
        self._watts = IDLE_WATTS + worked + self._wave(131)

    def values(self) -> list[GpuValue]:
        """Return every value that does not depend on the processes on the GPU."""
        return [
            UnifiedMemory(False),
            Bar1(BAR1_BYTES, 2 << 20),
            self._utilization(),
            self._power(),
            self.temperatures(),
            self._clocks(),
            self._ecc(),
            self._repairs(),
            Pcie(5, 5, 16, 16, 0),
            self._nvlink(),
            self._gpm(),
            PcieThroughput(self._pcie_traffic()),
        ]

    def temperatures(self) -> Temperatures:
        """Return the temperatures of GPU and memory, and the thresholds."""
        celsius = INLET_CELSIUS + self._rise() * self._slowdown + 0.6 * self._wave(173)
        memory = celsius + 1 + 6 * self._warmth
        return Temperatures({"gpu": round(celsius), "memory": round(memory)}, THRESHOLDS)

    def _rise(self) -> float:
        """Return how far power would heat the GPU above the air, without the driver's limit."""
        capped = min(self._traits.demand_watts, LIMIT_WATTS) - IDLE_WATTS
        return self._traits.kelvin_per_watt * (IDLE_WATTS + capped * self._warmth)

    @staticmethod
    def _headroom_celsius() -> float:
        return THRESHOLDS["gpu_max"] - INLET_CELSIUS

    def _wave(self, seconds: float) -> float:
        """Return a value from -1 to 1 that changes with the period `seconds`."""
        return math.sin(2 * math.pi * (self._at / seconds + self._traits.phase))

    def _utilization(self) -> Utilization:
        memory = self.busy * (0.52 + 0.05 * self._wave(149))
        return Utilization(round(self.busy, 2), round(memory, 2), 0, 0, 0, 0)

    def _power(self) -> Power:
        full = min(self._traits.demand_watts, LIMIT_WATTS) - IDLE_WATTS
        joules = self._traits.joules + IDLE_WATTS * self._at + full * self._worked
        return Power(round(self._watts, 3), LIMIT_WATTS, LIMIT_WATTS, round(joules, 3))

    def _clocks(self) -> Clocks:
        """Return the clocks: power and heat limit those of the SMs, in proportion to the power."""
        share = self._cap * self._slowdown
        running = {
            domain: hertz if domain == "memory" else round(hertz * share / 15e6) * 15e6
            for domain, hertz in MAX_HERTZ.items()
        }
        idle = dict.fromkeys(MAX_HERTZ, IDLE_HERTZ) | {"memory": MAX_HERTZ["memory"]}
        return Clocks(running if self.busy else idle, MAX_HERTZ, self._throttle(), 0)

    def _throttle(self) -> Mapping[str, bool]:
        active = {
            "gpu_idle": not self.busy,
            "sw_power_cap": self._cap < 1,
            "sw_thermal_slowdown": bool(self.busy) and self._slowdown < 1,
        }
        return dict.fromkeys(REASONS, False) | active

    def _ecc(self) -> Ecc:
        corrected = int(self._worked / _CORRECTED_SECONDS) if self._traits.corrects_errors else 0
        remapped = int(self._at >= self._traits.remapped_at)
        counts = {"corrected": corrected + remapped, "uncorrected": 0}
        scopes = ("volatile", "aggregate")
        return Ecc(True, {(kind, scope): counts[kind] for kind, scope in product(counts, scopes)})

    def _repairs(self) -> Repairs:
        remapped = self._at >= self._traits.remapped_at
        rows = {"correctable": int(remapped), "uncorrectable": 0}
        action = "gpu_reset" if remapped else "none"
        return Repairs(rows, remapped, False, recovery_action=action)

    def _nvlink(self) -> NvLink:
        errors = dict.fromkeys(product(range(LINKS), LINK_ERRORS), 0)
        if self._traits.faulty_link:
            errors[7, "replay"] = int(self._worked / _REPLAY_SECONDS)
        moved = self._exchanged(self._worked)
        return NvLink(dict.fromkeys(range(LINKS), True), errors, Traffic(moved, moved))

    def _gpm(self) -> Gpm:
        wave = 0.03 * self._wave(113)
        traffic = self._exchanged(self.busy)
        return Gpm(
            self.busy * (0.9 + wave),
            self.busy * (0.38 + wave),
            self.busy * (0.46 + wave),
            self.busy * (0.44 + wave),
            Traffic(traffic, traffic),
            self._pcie_traffic(),
        )

    def _exchanged(self, worked: float) -> float:
        return worked * NVLINK_BYTES_PER_SECOND if self._has_peers else 0.0

    def _pcie_traffic(self) -> Traffic:
        loaded = self.busy * LOADED_BYTES_PER_SECOND * (1 + 0.2 * self._wave(127))
        return Traffic(rx=loaded, tx=loaded / 12)
