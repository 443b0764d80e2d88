"""Every process on every GPU, PyTorch or not: its memory and utilization, and the memory that no process holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuLabels
from torchmem.exporter.reading import Reading
from torchmem.exporter.values import MemoryInfo, ProcessMemory, ProcessUtilization
from torchmem.sample import catalog
from torchmem.sample.families import Row, family

DEFAULT_PROCESSES_PER_GPU = 32
MOST_PROCESSES_PER_NODE = 1024
OTHER = "other"


@dataclass(frozen=True, slots=True)
class _Gpu:
    """The processes of one GPU: bytes by pid, those to show by the largest first, and the rest."""

    labels: GpuLabels
    memory: MemoryInfo | None
    used: Mapping[int, int | None]
    utilization: Mapping[int, ProcessUtilization]
    shown: Sequence[int]

    @property
    def others(self) -> list[int]:
        """Bytes of the processes that are not shown."""
        hidden = self.used.keys() - set(self.shown)
        return [bytes_ for pid in hidden if (bytes_ := self.used[pid]) is not None]


def collect(
    reading: Reading, processes_per_gpu: int = DEFAULT_PROCESSES_PER_GPU
) -> Iterator[Metric]:
    """The largest `processes_per_gpu` of each GPU by pid, and the sum of the others under pid="other"."""
    most = max(1, min(processes_per_gpu, MOST_PROCESSES_PER_NODE // max(1, len(reading.present))))
    reading.processes, reading.memory_of = {}, {}
    gpus = [gpu for _, gpu in reading.each(lambda uuid: _read(reading, uuid, most))]
    reading.processes = {gpu.labels: tuple(gpu.shown) for gpu in gpus}
    yield family(catalog.NVML_PROCESSES, [(gpu.labels, len(gpu.used)) for gpu in gpus])
    yield family(catalog.NVML_PROCESS_MEMORY, [row for gpu in gpus for row in _memory(gpu)])
    yield family(
        catalog.NVML_PROCESS_UTILIZATION, [row for gpu in gpus for row in _utilization(gpu)]
    )
    yield family(
        catalog.NVML_UNATTRIBUTED_MEMORY, [row for gpu in gpus for row in _unattributed(gpu)]
    )


def _read(reading: Reading, uuid: str, most: int) -> _Gpu | None:
    """One GPU; memory and list are asked for one right after the other, so that their difference means something."""
    nvml = reading.nvml
    memory, listed = nvml.memory(uuid), nvml.processes(uuid)
    if listed is None or reading.asked is None:
        return None
    rows = _plausible(listed, memory)
    mig = {
        (name, row.pid): row
        for row in rows
        for name in reading.mig_names.get(row.mig_uuid or "", ())
    }
    used = _by_pid(rows)
    whole = {(uuid, pid): ProcessMemory(pid, bytes_) for pid, bytes_ in used.items()}
    reading.memory_of = {**reading.memory_of, **whole, **mig}
    shown = sorted(used, key=lambda pid: (-(used[pid] or 0), pid))[:most]
    return _Gpu(reading.asked, memory, used, nvml.process_utilization(uuid) or {}, shown)


def _plausible(listed: Iterable[ProcessMemory], memory: MemoryInfo | None) -> list[ProcessMemory]:
    """Without rows that hold more than the GPU has: those are structures of another version, misread."""
    most = float("inf") if memory is None else memory.total
    return [row for row in listed if row.pid > 0 and (row.used_bytes or 0) <= most]


def _by_pid(rows: Iterable[ProcessMemory]) -> dict[int, int | None]:
    """Bytes by pid; those of a process on several MIG devices are added up."""
    used: dict[int, int | None] = {}
    for row in rows:
        before = used.get(row.pid, 0)
        used[row.pid] = (
            None if before is None or row.used_bytes is None else before + row.used_bytes
        )
    return used


def _memory(gpu: _Gpu) -> Iterator[Row]:
    for pid in gpu.shown:
        bytes_ = gpu.used[pid]
        if bytes_ is not None:
            yield (*gpu.labels, str(pid)), bytes_
    if gpu.others:
        yield (*gpu.labels, OTHER), sum(gpu.others)


def _utilization(gpu: _Gpu) -> Iterator[Row]:
    for pid in gpu.shown:
        found = gpu.utilization.get(pid, ProcessUtilization())
        yield from (((*gpu.labels, str(pid), engine), ratio) for engine, ratio in found.ratios())


def _unattributed(gpu: _Gpu) -> Iterator[Row]:
    """Absent unless everything is known; also when a process allocated between the two calls."""
    held = [bytes_ for bytes_ in gpu.used.values() if bytes_ is not None]
    if gpu.memory is None or gpu.memory.reserved is None or len(held) < len(gpu.used):
        return
    rest = gpu.memory.used - sum(held)
    if rest >= 0:
        yield gpu.labels, rest
