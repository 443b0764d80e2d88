"""What the exporter knows about GPUs: plain values, and the protocol that NVML, fakes and tests fulfil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

GpuLabels = tuple[str, str]
"""Values of the labels gpu (NVML index) and uuid."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU that answers: NVML index, UUID, product name, PCI bus id, driver version."""

    index: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    driver_version: str | None = None

    @property
    def labels(self) -> GpuLabels:
        """Values of the labels gpu and uuid."""
        return str(self.index), self.uuid


@dataclass(frozen=True, slots=True)
class GpuFault:
    """An NVML index that gave no identity, with the NVML return code."""

    index: int
    code: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes; with `reserved`, used + free + reserved = total, without it used includes it."""

    total: int
    used: int
    free: int
    reserved: int | None


@dataclass(frozen=True, slots=True)
class Utilization:
    """Share of the last sampling period, 0 to 1: a kernel ran, device memory was read or written."""

    gpu: float | None
    memory: float | None

    def ratios(self) -> list[tuple[str, float]]:
        """Engine and ratio, the known ones."""
        engines = (("gpu", self.gpu), ("memory", self.memory))
        return [(engine, ratio) for engine, ratio in engines if ratio is not None]


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that one process holds on one GPU; None where NVML may not or cannot say."""

    pid: int
    used_bytes: int | None


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


class Nvml(Protocol):
    """A source of GPU values. Every call may raise `NvmlDownError`, those with a uuid also `GpuDownError`.

    None means that this GPU, driver or permission does not give the value.
    """

    def open(self) -> None:
        """Bring NVML up; called again after a failure."""

    def close(self) -> None:
        """Let NVML go; never raises."""

    def pid_namespace(self) -> int | None:
        """Inode of the pid namespace in which `processes` counts; None when it is unknown."""

    def gpus(self) -> Sequence[GpuIdentity | GpuFault]:
        """Every GPU of the node, asked anew."""

    def fault(self, uuid: str) -> int | None:
        """NVML's return code for a GPU that `gpus` no longer lists; None when there is none."""

    def memory(self, uuid: str) -> MemoryInfo | None:
        """Device memory."""

    def utilization(self, uuid: str) -> Utilization | None:
        """Utilization over the driver's last sampling period."""

    def power_watts(self, uuid: str) -> float | None:
        """Power draw."""

    def temperatures(self, uuid: str) -> Mapping[str, float] | None:
        """Degrees Celsius by sensor: gpu, memory."""

    def processes(self, uuid: str) -> Sequence[ProcessMemory] | None:
        """Every process on the GPU, once, whatever kind of context it holds."""
