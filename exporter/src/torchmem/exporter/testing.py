"""A fake NVML made of plain values, for demos and tests: it answers what it is told, and fails when it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchmem.core.proc import pid_namespace
from torchmem.exporter.gpu import (
    GpuDownError,
    GpuFault,
    GpuIdentity,
    MemoryInfo,
    NvmlDownError,
    ProcessMemory,
    Utilization,
)


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """One GPU and its values; with `error_code` every call on it fails, as on a GPU that was lost."""

    identity: GpuIdentity
    memory: MemoryInfo | None = None
    utilization: Utilization | None = None
    power_watts: float | None = None
    temperatures: Mapping[str, float] = field(default_factory=dict)
    processes: Sequence[ProcessMemory] | None = ()
    error_code: int | None = None


class FakeNvml:
    """An `Nvml` whose GPUs come from `gpus`, called anew for each reading.

    A function that raises NvmlDownError plays a driver that does not answer. Its pids count as this process's do.
    """

    def __init__(self, gpus: Callable[[], Sequence[FakeGpu | GpuFault]]) -> None:
        self._ask = gpus
        self._gpus: dict[str, FakeGpu] = {}

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

    def gpus(self) -> Sequence[GpuIdentity | GpuFault]:
        """Identities and faults of what `gpus` gave."""
        answers = self._ask()
        self._gpus = {gpu.identity.uuid: gpu for gpu in answers if isinstance(gpu, FakeGpu)}
        return [gpu.identity if isinstance(gpu, FakeGpu) else gpu for gpu in answers]

    def fault(self, uuid: str) -> int | None:
        """NVML_ERROR_NOT_FOUND for a GPU that is not listed."""
        return None if uuid in self._gpus else 6

    def memory(self, uuid: str) -> MemoryInfo | None:
        """The memory given."""
        return self._gpu(uuid).memory

    def utilization(self, uuid: str) -> Utilization | None:
        """The utilization given."""
        return self._gpu(uuid).utilization

    def power_watts(self, uuid: str) -> float | None:
        """The power given."""
        return self._gpu(uuid).power_watts

    def temperatures(self, uuid: str) -> Mapping[str, float] | None:
        """The temperatures given."""
        return self._gpu(uuid).temperatures

    def processes(self, uuid: str) -> Sequence[ProcessMemory] | None:
        """The processes given."""
        return self._gpu(uuid).processes

    def _gpu(self, uuid: str) -> FakeGpu:
        gpu = self._gpus[uuid]
        if gpu.error_code is not None:
            raise GpuDownError(gpu.error_code)
        return gpu
