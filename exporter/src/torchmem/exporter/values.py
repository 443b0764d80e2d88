"""What NVML says about one GPU, one frozen dataclass for each subject; base units, None where it is not given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# nvmlDeviceGpuRecoveryAction_t of nvml.h (driver 580), by number.
RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the driver, of NVML itself, and the newest CUDA that the driver supports, such as 13.0."""

    driver: str | None = None
    nvml: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes; with `reserved`, used + free + reserved = total, without it used includes it."""

    total: int
    used: int
    free: int
    reserved: int | None


@dataclass(frozen=True, slots=True)
class Bar1:
    """The window through which the CPU and other devices reach device memory, in bytes."""

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class Utilization:
    """Share of the last sampling period, 0 to 1, in which each engine was busy.

    gpu: a kernel ran; memory: device memory was read or written; the others are the media engines.
    """

    gpu: float | None = None
    memory: float | None = None
    encoder: float | None = None
    decoder: float | None = None
    jpeg: float | None = None
    ofa: float | None = None

    def ratios(self) -> list[tuple[str, float]]:
        """Engine and ratio, the known ones."""
        engines = ("gpu", "memory", "encoder", "decoder", "jpeg", "ofa")
        found = ((engine, getattr(self, engine)) for engine in engines)
        return [(engine, ratio) for engine, ratio in found if ratio is not None]


@dataclass(frozen=True, slots=True)
class Power:
    """Draw, enforced limit and highest possible limit in watts; energy in joules since the driver was loaded."""

    watts: float | None = None
    limit_watts: float | None = None
    limit_max_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class Temperatures:
    """Degrees Celsius by sensor (gpu, memory) and by threshold (shutdown, slowdown, memory_max, gpu_max)."""

    sensors: Mapping[str, float] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Hertz by domain (graphics, sm, memory, video), now and at most.

    `throttle`: every reason for a lower clock, and whether it holds; `performance_state`: 0 (fastest) to 15.
    """

    hertz: Mapping[str, float] = field(default_factory=dict)
    max_hertz: Mapping[str, float] = field(default_factory=dict)
    throttle: Mapping[str, bool] = field(default_factory=dict)
    performance_state: int | None = None


@dataclass(frozen=True, slots=True)
class Pcie:
    """Link generation and width (lanes), now and at most; `replays` since the driver was loaded."""

    generation: int | None = None
    max_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    replays: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Received and transmitted: bytes, or bytes per second."""

    rx: float | None = None
    tx: float | None = None

    def directions(self) -> list[tuple[str, float]]:
        """Direction and value, the known ones."""
        found = (("rx", self.rx), ("tx", self.tx))
        return [(direction, value) for direction, value in found if value is not None]


@dataclass(frozen=True, slots=True)
class NvLink:
    """Whether each link is up, errors by (link, kind), and bytes over all links."""

    up: Mapping[int, bool] = field(default_factory=dict)
    errors: Mapping[tuple[int, str], int] = field(default_factory=dict)
    transferred: Transfer = Transfer()


@dataclass(frozen=True, slots=True)
class Ecc:
    """Whether ECC is on, and errors by (kind: corrected, uncorrected; scope: volatile, aggregate)."""

    enabled: bool | None = None
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Repairs:
    """Device memory taken out of use: rows remapped (Ampere and later), pages retired (before).

    `recovery_action`: what the driver asks an operator to do, one of RECOVERY_ACTIONS.
    """

    remapped_rows: Mapping[str, int] = field(default_factory=dict)
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages: Mapping[str, int] = field(default_factory=dict)
    retirement_pending: bool | None = None
    recovery_action: str | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One compute instance, that is one MIG device: its UUID, its place, its profile such as 1g.10gb.

    `memory` belongs to the whole GPU instance: all its compute instances give the same.
    """

    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str | None = None
    memory: MemoryInfo | None = None


@dataclass(frozen=True, slots=True)
class Mig:
    """Whether the GPU is in MIG mode, and its instances."""

    enabled: bool
    instances: Sequence[MigInstance] = ()


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that one process holds on one GPU; None where NVML may not or cannot say.

    `mig_uuid`: the MIG device that holds them, on a GPU in MIG mode.
    """

    pid: int
    used_bytes: int | None
    mig_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessUtilization:
    """Share of time, 0 to 1, in which kernels of one process ran (sm) and used device memory (memory)."""

    sm: float | None = None
    memory: float | None = None

    def ratios(self) -> list[tuple[str, float]]:
        """Engine and ratio, the known ones."""
        found = (("sm", self.sm), ("memory", self.memory))
        return [(engine, ratio) for engine, ratio in found if ratio is not None]


@dataclass(frozen=True, slots=True)
class Gpm:
    """Means between two samples (GPU performance monitoring, Hopper and later): ratios and bytes per second."""

    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    nvlink: Transfer = Transfer()
    pcie: Transfer = Transfer()


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something that happened to a GPU; `xid` when it was an XID error, else `name` says what."""

    uuid: str
    name: str
    xid: int | None = None
