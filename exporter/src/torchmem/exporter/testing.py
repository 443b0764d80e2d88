"""A fake NVML made of plain values, for demos and tests: it answers what it is told, and fails when it is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from torchmem.exporter.gpu import Events, GpuDownError, GpuFault, GpuIdentity, NvmlDownError
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
from torchmem.sample.procfs import pid_namespace


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """One GPU and its values; with `error_code` every call on it fails, as on a GPU that was lost."""

    identity: GpuIdentity
    memory: MemoryInfo | None = None
    unified_memory: bool | None = None
    bar1: Bar1 | None = None
    utilization: Utilization | None = None
    power: Power | None = None
    temperatures: Temperatures | None = None
    clocks: Clocks | None = None
    fans: Sequence[float | None] | None = None
    pcie: Pcie | None = None
    pcie_throughput: Transfer | None = None
    nvlink: NvLink | None = None
    ecc: Ecc | None = None
    repairs: Repairs | None = None
    mig: Mig | None = None
    processes: Sequence[ProcessMemory] | None = ()
    process_utilization: Mapping[int, ProcessUtilization] | None = None
    gpm: Gpm | None = None
    event_kinds: frozenset[str] = frozenset()
    error_code: int | None = None


@dataclass(slots=True)
class FakeEvents:
    """Events that a test puts into a queue; an exception in it is raised."""

    kinds: Mapping[str, frozenset[str]]
    coming: SimpleQueue[GpuEvent | Exception] = field(default_factory=SimpleQueue)
    is_closed: bool = False

    def wait(self, seconds: float) -> GpuEvent | None:
        """The next of the queue."""
        try:
            event = self.coming.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class FakeNvml:
    """An `Nvml` whose GPUs come from `gpus`, called anew for each reading.

    A function that raises NvmlDownError plays a driver that does not answer. Its pids count as this process's do.
    `subscriptions` holds every event subscription that was made.
    """

    def __init__(
        self, gpus: Callable[[], Sequence[FakeGpu | GpuFault]], versions: Versions | None = None
    ) -> None:
        self._ask = gpus
        self._versions = versions or Versions()
        self._answers: Sequence[FakeGpu | GpuFault] = ()
        self._gpus: dict[str, FakeGpu] = {}
        self.subscriptions: list[FakeEvents] = []

    @classmethod
    def of(cls, *gpus: FakeGpu | GpuFault) -> FakeNvml:
        """A fake with fixed values."""
        return cls(lambda: gpus)

    @classmethod
    def down(cls, reason: str) -> FakeNvml:
        """A fake that never comes up."""

        def fail() -> Sequence[FakeGpu]:
            raise NvmlDownError(reason)

        return cls(fail)

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to let go."""

    def pid_namespace(self) -> int | None:
        """The pid namespace of this process."""
        return pid_namespace()

    def versions(self) -> Versions:
        """The versions given."""
        return self._versions

    def count(self) -> int:
        """Asks `gpus` anew."""
        self._answers = self._ask()
        self._gpus = {gpu.identity.uuid: gpu for gpu in self._answers if isinstance(gpu, FakeGpu)}
        return len(self._answers)

    def gpu(self, index: int) -> GpuIdentity | GpuFault:
        """Identity or fault of what `gpus` gave."""
        gpu = self._answers[index]
        return gpu.identity if isinstance(gpu, FakeGpu) else gpu

    def keep(self, uuids: Collection[str]) -> None:
        """Nothing to let go."""

    def fault(self, uuid: str) -> int | None:
        """NVML_ERROR_NOT_FOUND for a GPU that is not listed."""
        return None if uuid in self._gpus else 6

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """The event kinds given; None when no GPU has any."""
        kinds = {
            uuid: self._gpus[uuid].event_kinds for uuid in uuids if self._gpus[uuid].event_kinds
        }
        if not kinds:
            return None
        self.subscriptions.append(FakeEvents(kinds))
        return self.subscriptions[-1]

    def memory(self, uuid: str) -> MemoryInfo | None:
        """The memory given."""
        return self._gpu(uuid).memory

    def unified_memory(self, uuid: str) -> bool | None:
        """The unified memory given."""
        return self._gpu(uuid).unified_memory

    def bar1(self, uuid: str) -> Bar1 | None:
        """The bar1 given."""
        return self._gpu(uuid).bar1

    def utilization(self, uuid: str) -> Utilization | None:
        """The utilization given."""
        return self._gpu(uuid).utilization

    def power(self, uuid: str) -> Power | None:
        """The power given."""
        return self._gpu(uuid).power

    def temperatures(self, uuid: str) -> Temperatures | None:
        """The temperatures given."""
        return self._gpu(uuid).temperatures

    def clocks(self, uuid: str) -> Clocks | None:
        """The clocks given."""
        return self._gpu(uuid).clocks

    def fans(self, uuid: str) -> Sequence[float | None] | None:
        """The fans given."""
        return self._gpu(uuid).fans

    def pcie(self, uuid: str) -> Pcie | None:
        """The pcie given."""
        return self._gpu(uuid).pcie

    def pcie_throughput(self, uuid: str) -> Transfer | None:
        """The pcie throughput given."""
        return self._gpu(uuid).pcie_throughput

    def nvlink(self, uuid: str) -> NvLink | None:
        """The nvlink given."""
        return self._gpu(uuid).nvlink

    def ecc(self, uuid: str) -> Ecc | None:
        """The ecc given."""
        return self._gpu(uuid).ecc

    def repairs(self, uuid: str) -> Repairs | None:
        """The repairs given."""
        return self._gpu(uuid).repairs

    def mig(self, uuid: str) -> Mig | None:
        """The mig given."""
        return self._gpu(uuid).mig

    def processes(self, uuid: str) -> Sequence[ProcessMemory] | None:
        """The processes given."""
        return self._gpu(uuid).processes

    def process_utilization(self, uuid: str) -> Mapping[int, ProcessUtilization] | None:
        """The process utilization given."""
        return self._gpu(uuid).process_utilization

    def gpm(self, uuid: str) -> Gpm | None:
        """The gpm given."""
        return self._gpu(uuid).gpm

    def _gpu(self, uuid: str) -> FakeGpu:
        gpu = self._gpus[uuid]
        if gpu.error_code is not None:
            raise GpuDownError(gpu.error_code)
        return gpu
