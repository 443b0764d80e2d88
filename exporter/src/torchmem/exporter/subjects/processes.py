"""Processes on GPUs, with or without PyTorch: memory, utilization and owner.

Also the used memory that belongs to no process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.core import Metric

from torchmem.explain.parts import MAX_GPU_BYTES
from torchmem.exporter.gpus import GpuLabels, GpuValue
from torchmem.exporter.nvml import NOT_FOUND, NvmlDevice, available
from torchmem.exporter.pod_names import PodNames, PodProcess
from torchmem.exporter.process_owners import ProcessOwners
from torchmem.exporter.reading import Reading
from torchmem.exporter.slurm_jobs import SlurmJob
from torchmem.exporter.subjects import mig
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.metrics import catalog
from torchmem.metrics.families import Row, by_last_label, family, info
from torchmem.node.gpu_holders import DeadProcess
from torchmem.node.published import Published

MAX_PROCESSES_PER_NODE = 1024
_OTHER = "other"
_MAX_PID = (1 << 31) - 1
"""The kernel's pid_t."""
_UTILIZATION_WINDOW_SECONDS = 10.0
_UTILIZATION = "nvmlDeviceGetProcessUtilization"

_COMPUTE = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)
_GRAPHICS = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
)
_MPS = (
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2",
)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that one process holds on one GPU; None where NVML cannot or may not report them.

    `mig_uuid`: the MIG device that they are on, for a GPU in MIG mode.
    """

    pid: int
    used_bytes: int | None
    mig_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessUtilization:
    """Ratio of time in which kernels of a process ran (sm) and accessed device memory (memory)."""

    sm: float | None = None
    memory: float | None = None

    def ratios(self) -> Mapping[str, float | None]:
        """Return the ratios by engine."""
        return {"sm": self.sm, "memory": self.memory}


@dataclass(frozen=True, slots=True)
class Processes(GpuValue):
    """All processes on a GPU, once for each MIG device; utilization by pid.

    `memory` is the GPU's, read immediately before the list so that their difference is meaningful.
    `free` holds the free bytes of the GPU (None) or of its MIG devices by UUID, for those that had
    the same before and after their processes were listed. `mps_pids`: the clients of MPS, whose
    pids are those of its server's pid namespace.
    """

    listed: Sequence[ProcessMemory] = ()
    utilization: Mapping[int, ProcessUtilization] = field(default_factory=dict)
    memory: MemoryInfo | None = None
    free: Mapping[str | None, int] = field(default_factory=dict)
    mps_pids: frozenset[int] = frozenset()

    @property
    def unattributed(self) -> int | None:
        """The used bytes that do not belong to any process.

        None if a value is unknown, or if a process allocated between two calls.
        """
        used = bytes_by_pid(self.listed).values()
        known = [size for size in used if size is not None]
        if self.memory is None or self.memory.reserved is None or len(known) < len(used):
            return None
        rest = self.memory.used - sum(known)
        return rest if rest >= 0 else None

    @classmethod
    def read(cls, gpu: NvmlDevice) -> Processes | None:
        """Read the GPU's processes or, in MIG mode, those of its MIG devices."""
        memory = MemoryInfo.read(gpu)
        lists = list(_lists(gpu, memory))
        if any(part.rows is None for part in lists):
            return None
        rows = list(_possible(gpu, [row for part in lists for row in part.rows or ()], memory))
        if gpu.nvml.is_wsl and not rows:
            return None  # the processes of Windows are not listed
        free = {part.mig_uuid: part.free for part in lists if part.free is not None}
        mps = frozenset[int]().union(*(part.mps_pids for part in lists))
        return cls(rows, _utilization(gpu) if rows else {}, memory, free, mps)


def _possible(
    gpu: NvmlDevice, rows: Iterable[ProcessMemory], memory: MemoryInfo | None
) -> Iterator[ProcessMemory]:
    """Yield the rows that can be true, without bytes that cannot; what is left out is logged.

    A structure of another version mixes pids and bytes up. A GPU that shares the host's memory may
    say that it has less than a process holds.
    """
    most = MAX_GPU_BYTES if memory is None else memory.total
    for row in rows:
        used = row.used_bytes or 0
        if not 0 < row.pid <= _MAX_PID:
            gpu.nvml.missing_values.note_impossible(_COMPUTE[0], f"pid {row.pid}")
        elif used > most:
            text = f"{used} bytes of process {row.pid}, on a GPU of {most}"
            gpu.nvml.missing_values.note_impossible("usedGpuMemory", text)
            yield replace(row, used_bytes=None)
        else:
            yield row


@dataclass(frozen=True, slots=True)
class _List:
    """The processes of one GPU or MIG device; `free` and `mps_pids` as in `Processes`."""

    mig_uuid: str | None
    rows: Sequence[ProcessMemory] | None
    free: int | None
    mps_pids: frozenset[int] = frozenset()


def _lists(gpu: NvmlDevice, memory: MemoryInfo | None) -> Iterator[_List]:
    """Yield the GPU's list or, in MIG mode, those of its MIG devices; `memory` is the GPU's."""
    if mig.is_in_mig_mode(gpu):
        for device in mig.mig_devices(gpu):
            yield _list_on(device, mig.device_uuid(device), MemoryInfo.read(device))
    else:
        yield _list_on(gpu, None, memory)


def _list_on(device: NvmlDevice, mig_uuid: str | None, before: MemoryInfo | None) -> _List:
    """Merge the lists: a pid can be in several, each time with all the memory of the process."""
    compute = device.call_first(_COMPUTE)
    if compute is None:
        return _List(mig_uuid, None, None)
    graphics, mps = (device.call_first(names) or () for names in (_GRAPHICS, _MPS))
    rows = [*compute, *graphics, *mps]
    listed = [ProcessMemory(pid, used, mig_uuid) for pid, used in _merged(rows).items()]
    after = MemoryInfo.read(device)
    is_same = before and after and before.free == after.free
    free = before.free if before and is_same else None
    return _List(mig_uuid, listed, free, frozenset(row.pid for row in mps))


def _merged(rows: Iterable[Any]) -> dict[int, int | None]:
    merged: dict[int, int | None] = {}
    for row in rows:
        used, before = available(row.usedGpuMemory), merged.get(row.pid)
        merged[row.pid] = before if used is None else max(used, before or 0)
    return merged


def _utilization(gpu: NvmlDevice) -> Mapping[int, ProcessUtilization]:
    """Call nvmlDeviceGetProcessUtilization: the newest sample of each process in the last 10 s.

    The window does not depend on earlier calls, so that two Prometheus servers see the same. The
    call takes 2 to 3 ms on an H200.
    """
    since = int((gpu.nvml.clock() - _UTILIZATION_WINDOW_SECONDS) * 1e6)
    samples, code = gpu.nvml.try_call(_UTILIZATION, gpu.handle, since)
    if code not in (0, NOT_FOUND):  # not found: no process used the GPU since then
        gpu.nvml.check(_UTILIZATION, code)
    newest = {row.pid: row for row in sorted(samples or (), key=_time) if _time(row) > since}
    return {
        pid: ProcessUtilization(_share(row.smUtil), _share(row.memUtil))
        for pid, row in newest.items()
    }


def _time(sample: Any) -> int:
    return int(sample.timeStamp)


def _share(percent: int) -> float | None:
    """Return a ratio; more than 100% is a row that the driver did not fill in."""
    return percent / 100 if percent <= 100 else None


@dataclass(frozen=True, slots=True)
class _GpuTable:
    """The processes of one GPU: bytes by pid, and the pids that have series of their own."""

    labels: GpuLabels
    processes: Processes
    used: Mapping[int, int | None]
    pids: Sequence[int]

    @property
    def used_by_others(self) -> list[int]:
        """Bytes of the processes without series of their own."""
        others = [self.used[pid] for pid in self.used.keys() - set(self.pids)]
        return [used for used in others if used is not None]


def families(reading: Reading) -> Iterator[Metric]:
    """Yield the largest processes of each GPU by pid, and the sum of the others as pid="other"."""
    reading.read(Processes)
    tables = _tables(reading)
    yield family(catalog.NVML_PROCESSES, [(table.labels, len(table.used)) for table in tables])
    yield family(catalog.NVML_PROCESS_MEMORY, _rows(_memory, tables))
    yield family(catalog.NVML_PROCESS_UTILIZATION, _rows(_utilization_rows, tables))
    yield family(catalog.NVML_UNATTRIBUTED_MEMORY, _rows(_unattributed, tables))


def _tables(reading: Reading) -> list[_GpuTable]:
    limit = min(reading.processes_per_gpu, MAX_PROCESSES_PER_NODE // max(1, len(reading.present)))
    return [
        _table(gpu.labels, processes, max(1, limit)) for gpu, processes in reading.values(Processes)
    ]


def _table(labels: GpuLabels, processes: Processes, limit: int) -> _GpuTable:
    used = bytes_by_pid(processes.listed)
    pids = sorted(used, key=lambda pid: (-(used[pid] or 0), pid))[:limit]
    return _GpuTable(labels, processes, used, pids)


def bytes_by_pid(rows: Iterable[ProcessMemory]) -> dict[int, int | None]:
    """Add up the bytes of a process on several MIG devices."""
    used: dict[int, int | None] = {}
    for row in rows:
        before = used.get(row.pid, 0)
        unknown = before is None or row.used_bytes is None
        used[row.pid] = None if unknown else (before or 0) + (row.used_bytes or 0)
    return used


def _rows(
    rows_of: Callable[[_GpuTable], Iterator[Row]], tables: Iterable[_GpuTable]
) -> Iterator[Row]:
    for table in tables:
        yield from rows_of(table)


def _memory(table: _GpuTable) -> Iterator[Row]:
    for pid in table.pids:
        used = table.used[pid]
        if used is not None:
            yield (*table.labels, str(pid)), used
    if table.used_by_others:
        yield (*table.labels, _OTHER), sum(table.used_by_others)


def _utilization_rows(table: _GpuTable) -> Iterator[Row]:
    utilization = table.processes.utilization
    return by_last_label(
        ((*table.labels, str(pid)), utilization[pid].ratios())
        for pid in table.pids
        if pid in utilization
    )


def _unattributed(table: _GpuTable) -> Iterator[Row]:
    rest = table.processes.unattributed
    if rest is not None:
        yield table.labels, rest


def process_facts(
    reading: Reading,
    published: Sequence[Published],
    owners: ProcessOwners,
    pods: PodNames,
    jobs: Mapping[str, SlurmJob],
) -> Mapping[int, Mapping[str, str]]:
    """Return the known facts about the processes with series of their own, and their rank, by pid.

    NVML's pids must be the exporter's. A rank is named only if the sample certainly comes from the
    process: an equal pid alone does not prove it. `jobs` by ID or SLUID; without one of them, a
    rank's job is what its environment says.
    """
    tables = _tables(reading) if reading.has_families("processes") else []
    ranks = {item.pid: item.rank_labels() for item in published if item.attributed}
    facts = {pid: owners.labels(pid) for table in tables for pid in table.pids}
    names = pods.labels(_in_pods(facts, tables))
    said = {item.pid: item.sample.process.labels for item in published if item.attributed}
    return {
        pid: {
            **_job(found, jobs, said.get(pid, {})),
            **found,
            **names.get(pid, {}),
            **ranks.get(pid, {}),
        }
        for pid, found in facts.items()
    }


def _job(
    facts: Mapping[str, str], jobs: Mapping[str, SlurmJob], said: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the ID of the job of which the control group has only the SLUID."""
    sluid = facts.get("slurm_sluid", "")
    job = jobs[sluid].id if sluid in jobs else said.get("slurm_job_id")
    return {"slurm_job_id": job} if sluid and job else {}


def info_families(
    reading: Reading,
    facts: Mapping[int, Mapping[str, str]],
    dead: Mapping[str, Sequence[DeadProcess]],
) -> Iterator[Metric]:
    """Yield the facts, also those of dead processes, whose state is "dead"."""
    tables = _tables(reading) if reading.has_families("processes") else []
    gone = {
        (uuid, process.pid): {**process.facts, "state": "dead"}
        for uuid, processes in dead.items()
        for process in processes
    }
    rows = (
        ((*table.labels, str(pid)), gone.get((table.labels[1], pid)) or facts.get(pid))
        for table in tables
        for pid in table.pids
    )
    yield info(catalog.NVML_PROCESS_INFO, [(labels, known) for labels, known in rows if known])


def _in_pods(
    facts: Mapping[int, Mapping[str, str]], tables: Sequence[_GpuTable]
) -> Mapping[int, PodProcess]:
    """Return the processes whose control groups name a pod, with the GPUs that they use."""
    gpus: dict[int, set[str]] = {}
    for table in tables:
        for process in table.processes.listed:
            gpus.setdefault(process.pid, set()).add(process.mig_uuid or table.labels[1])
    return {
        pid: PodProcess(labels["pod_uid"], labels.get("container_id"), frozenset(gpus[pid]))
        for pid, labels in facts.items()
        if "pod_uid" in labels
    }
