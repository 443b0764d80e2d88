"""Which GPUs there are, how they fail, and the protocol that NVML, fakes and tests fulfil."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchmem.exporter.values import (
    Bar1,
    Clocks,
    Ecc,
    Gpm,
    GpuEvent,
    MemoryInfo,
    Mig,
    NvLink,
    Pcie,
    Power,
    ProcessMemory,
    ProcessUtilization,
    Repairs,
    Temperatures,
    Transfer,
    Utilization,
    Versions,
)

GpuLabels = tuple[str, str]
"""Values of the labels gpu (NVML index) and uuid."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU that answers: NVML index, UUID, and what else says which one it is and how it is set up."""

    index: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    driver_version: str | None = None
    vbios_version: str | None = None
    compute_mode: str | None = None
    persistence_mode: str | None = None

    @property
    def labels(self) -> GpuLabels:
        """Values of the labels gpu and uuid."""
        return str(self.index), self.uuid


@dataclass(frozen=True, slots=True)
class GpuFault:
    """An NVML index that gave no identity, with the NVML return code."""

    index: int
    code: int


class NvmlDownError(Exception):
    """NVML as a whole does not answer; `reason` is one word for the label of `nvml_up`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"NVML does not answer: {reason}")
        self.reason = reason


class GpuDownError(Exception):
    """One GPU does not answer; `code` is NVML's return code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the GPU does not answer: NVML return code {code}")
        self.code = code


class NvmlCallError(Exception):
    """One call failed although its GPU answers; `code` is NVML's return code. It costs that value alone."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed: NVML return code {code}")
        self.code = code


class Events(Protocol):
    """A subscription to what happens to GPUs; used by one thread, it outlives the `Nvml` that made it."""

    @property
    def kinds(self) -> Mapping[str, frozenset[str]]:
        """The names of the events that are watched, by GPU UUID."""

    def wait(self, seconds: float) -> GpuEvent | None:
        """The next event, None when there is none in time; raises NvmlDownError or GpuDownError."""

    def close(self) -> None:
        """Let the subscription go; never raises."""


class Nvml(Protocol):
    """A source of GPU values. Every call may raise `NvmlDownError`, those with a uuid also `GpuDownError` and
    `NvmlCallError`.

    None means that this GPU, driver or permission does not give the value.
    """

    def open(self) -> None:
        """Bring NVML up; called again after a failure."""

    def close(self) -> None:
        """Let NVML go; never raises."""

    def pid_namespace(self) -> int | None:
        """Inode of the pid namespace in which `processes` counts; None when it is unknown."""

    def versions(self) -> Versions:
        """Versions of the driver and its libraries."""

    def count(self) -> int:
        """How many GPUs the node has."""

    def gpu(self, index: int) -> GpuIdentity | GpuFault:
        """The GPU at this NVML index, asked anew: until it answered, no call with its uuid is made."""

    def keep(self, uuids: Collection[str]) -> None:
        """Only these GPUs are there: what belongs to others is let go."""

    def fault(self, uuid: str) -> int | None:
        """NVML's return code for a GPU that has no index any more; None when there is none."""

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """Watch these GPUs from now on; None where events are not supported."""

    def memory(self, uuid: str) -> MemoryInfo | None:
        """Device memory."""

    def unified_memory(self, uuid: str) -> bool | None:
        """Whether the GPU has no memory of its own but shares the CPU's."""

    def bar1(self, uuid: str) -> Bar1 | None:
        """The BAR1 window."""

    def utilization(self, uuid: str) -> Utilization | None:
        """Utilization over the driver's last sampling period."""

    def power(self, uuid: str) -> Power | None:
        """Power and energy."""

    def temperatures(self, uuid: str) -> Temperatures | None:
        """Temperatures and their thresholds."""

    def clocks(self, uuid: str) -> Clocks | None:
        """Clocks and what holds them down."""

    def fans(self, uuid: str) -> Sequence[float | None] | None:
        """Speed of every fan as a share of its highest."""

    def pcie(self, uuid: str) -> Pcie | None:
        """The PCIe link."""

    def pcie_throughput(self, uuid: str) -> Transfer | None:
        """Bytes per second over PCIe; takes 20 ms for each direction."""

    def nvlink(self, uuid: str) -> NvLink | None:
        """The NVLink links."""

    def ecc(self, uuid: str) -> Ecc | None:
        """ECC mode and errors."""

    def repairs(self, uuid: str) -> Repairs | None:
        """Remapped rows and retired pages."""

    def mig(self, uuid: str) -> Mig | None:
        """MIG mode and instances, enumerated anew."""

    def processes(self, uuid: str) -> Sequence[ProcessMemory] | None:
        """Every process on the GPU, once per MIG device or once, whatever kind of context it holds."""

    def process_utilization(self, uuid: str) -> Mapping[int, ProcessUtilization] | None:
        """Utilization of the processes that were at work during the last seconds, by pid."""

    def gpm(self, uuid: str) -> Gpm | None:
        """Means since the previous call that is long enough ago."""
