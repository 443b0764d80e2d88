"""NVML through nvidia-ml-py: one file for each subject, and `PyNvml`, which gives them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchmem.exporter.gpu import Events, GpuFault, GpuIdentity, NvmlDownError
from torchmem.exporter.nvml import (
    activity,
    events,
    health,
    identity,
    links,
    memory,
    mig,
    power,
    processes,
)
from torchmem.exporter.nvml.binding import Door
from torchmem.exporter.nvml.gpm import GpmWindows
from torchmem.exporter.values import (
    Bar1,
    Clocks,
    Ecc,
    Gpm,
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
from torchmem.sample.process_table import INITIAL_PID_NAMESPACE


class PyNvml:
    """The `Nvml` of a real driver. `module` is pynvml, or an object that behaves like it; `clock` in Unix seconds."""

    def __init__(self, module: Any = None, clock: Callable[[], float] = time.time) -> None:
        self._door = Door(module)
        self._clock = clock
        self._handles: dict[str, Any] = {}
        self._gpm = GpmWindows(self._door)
        self._link_errors: dict[str, Mapping[tuple[int, str], int]] = {}

    def open(self) -> None:
        """nvmlInit; raises NvmlDownError with the reason when there is no module, library or matching driver."""
        self._door.demand("nvmlInit")

    def close(self) -> None:
        """Shut NVML down, best effort."""
        with suppress(NvmlDownError):
            self._link_errors = {}
            self._gpm.forget_all_but(())
            self._door.code_of("nvmlShutdown")

    def pid_namespace(self) -> int | None:
        """The driver counts in the initial pid namespace, also when it is asked from a container."""
        return INITIAL_PID_NAMESPACE

    def versions(self) -> Versions:
        """Driver, NVML, CUDA."""
        return identity.versions(self._door)

    def count(self) -> int:
        """nvmlDeviceGetCount."""
        return int(self._door.demand("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> GpuIdentity | GpuFault:
        """The identity; a fault where the GPU does not answer."""
        return identity.gpu(self._door, index, self._handles)

    def keep(self, uuids: Collection[str]) -> None:
        """Forget handles, GPM samples and NVLink counts of all other GPUs."""
        self._handles = {uuid: handle for uuid, handle in self._handles.items() if uuid in uuids}
        self._link_errors = {
            uuid: errors for uuid, errors in self._link_errors.items() if uuid in uuids
        }
        self._gpm.forget_all_but(uuids)

    def fault(self, uuid: str) -> int | None:
        """The return code of nvmlDeviceGetHandleByUUID."""
        return self._door.code_of("nvmlDeviceGetHandleByUUID", uuid) or None

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """An event set of its own, with an nvmlInit of its own: it may be waited for while this one is closed."""
        return events.subscribe(self._door, {uuid: self._handles[uuid] for uuid in uuids})

    def memory(self, uuid: str) -> MemoryInfo | None:
        """Device memory, version 2 where the driver knows it."""
        return memory.read(self._door, self._handles[uuid])

    def unified_memory(self, uuid: str) -> bool | None:
        """True where NVML says that memory is not supported."""
        return memory.unified(self._door, self._handles[uuid])

    def bar1(self, uuid: str) -> Bar1 | None:
        """BAR1 bytes."""
        return memory.bar1(self._door, self._handles[uuid])

    def utilization(self, uuid: str) -> Utilization:
        """Ratios by engine."""
        return activity.utilization(self._door, self._handles[uuid])

    def power(self, uuid: str) -> Power:
        """Watts and joules."""
        return power.read(self._door, self._handles[uuid])

    def temperatures(self, uuid: str) -> Temperatures:
        """Degrees Celsius."""
        return power.temperatures(self._door, self._handles[uuid])

    def clocks(self, uuid: str) -> Clocks:
        """Hertz, throttle reasons and performance state."""
        return activity.clocks(self._door, self._handles[uuid])

    def fans(self, uuid: str) -> Sequence[float | None]:
        """Ratios by fan."""
        return power.fans(self._door, self._handles[uuid])

    def pcie(self, uuid: str) -> Pcie:
        """Generation, width, replays."""
        return links.pcie(self._door, self._handles[uuid])

    def pcie_throughput(self, uuid: str) -> Transfer:
        """Bytes per second; takes 40 ms."""
        return links.pcie_throughput(self._door, self._handles[uuid])

    def nvlink(self, uuid: str) -> NvLink:
        """State, errors and bytes."""
        found = links.nvlink(self._door, self._handles[uuid], self._link_errors.get(uuid, {}))
        self._link_errors[uuid] = found.errors
        return found

    def ecc(self, uuid: str) -> Ecc:
        """Mode and errors."""
        return health.ecc(self._door, self._handles[uuid])

    def repairs(self, uuid: str) -> Repairs:
        """Remapped rows and retired pages."""
        return health.repairs(self._door, self._handles[uuid])

    def mig(self, uuid: str) -> Mig | None:
        """Mode and instances."""
        return mig.read(self._door, self._handles[uuid])

    def processes(self, uuid: str) -> Sequence[ProcessMemory] | None:
        """Compute, graphics and MPS processes of the GPU or, in MIG mode, of its MIG devices."""
        return processes.read(self._door, self._handles[uuid])

    def process_utilization(self, uuid: str) -> Mapping[int, ProcessUtilization] | None:
        """Ratios by pid."""
        return processes.utilization(self._door, self._handles[uuid], self._clock())

    def gpm(self, uuid: str) -> Gpm | None:
        """Means over the window that ends now."""
        return self._gpm.read(uuid, self._handles[uuid])
