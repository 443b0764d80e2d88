"""Every process on every GPU, PyTorch or not: its memory, and its name and user where /proc shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from torchmem.core import catalog, proc
from torchmem.core.families import family, info
from torchmem.core.untrusted import harmless
from torchmem.exporter.gpu import ProcessMemory
from torchmem.exporter.reading import Reading


def collect(reading: Reading) -> Iterator[Metric]:
    """Memory of every process; what exceeds the GPU's memory is a misread structure and left out."""
    totals = {gpu.uuid: memory.total for gpu, memory in reading.each(reading.nvml.memory)}
    found = {
        (*gpu.labels, process.pid): process
        for gpu, processes in reading.each(reading.nvml.processes)
        for process in processes
        if process.pid > 0 and (process.used_bytes or 0) <= totals.get(gpu.uuid, process.used_bytes or 0)
    }
    reading.processes = {(uuid, pid): process for (_, uuid, pid), process in found.items()}
    rows = [((gpu, uuid, str(pid)), process) for (gpu, uuid, pid), process in found.items()]
    known = [(labels, process.used_bytes) for labels, process in rows if process.used_bytes is not None]
    yield family(catalog.NVML_PROCESS_MEMORY, known)
    facts = [(labels, _facts(process)) for labels, process in rows] if _shares_namespace(reading) else []
    yield info(catalog.NVML_PROCESS_INFO, [row for row in facts if row[1]])


def _shares_namespace(reading: Reading) -> bool:
    """Whether the driver and this process count pids alike; elsewhere the same number names another process."""
    namespace = reading.nvml.pid_namespace()
    return namespace is not None and namespace == proc.pid_namespace()


def _facts(process: ProcessMemory) -> Mapping[str, str]:
    """Short name and numeric user id; the command line may hold secrets and is never shown."""
    name, uid = _name(process.pid), proc.owner(process.pid)
    return {"name": name, "uid": str(uid)} if name is not None and uid is not None else {}


def _name(pid: int) -> str | None:
    try:
        return harmless((proc.PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n"))
    except OSError:
        return None
