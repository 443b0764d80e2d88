"""Processes on a GPU: their memory and utilization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchmem.exporter.nvml import mig
from torchmem.exporter.nvml.binding import Door, real
from torchmem.exporter.values import ProcessMemory, ProcessUtilization

_OTHER_KINDS = ("Graphics", "MPSCompute")
UTILIZATION_WINDOW_SECONDS = 10.0


def read(door: Door, handle: Any) -> Sequence[ProcessMemory] | None:
    """All processes of the GPU, in MIG mode those of its MIG devices; None when a list is not given."""
    if not mig.is_enabled(door, handle):
        return _of_device(door, handle, None)
    found: list[ProcessMemory] = []
    for device in mig.devices(door, handle):
        listed = _of_device(door, device, mig.uuid_of(door, device))
        if listed is None:
            return None
        found.extend(listed)
    return found


def _of_device(door: Door, handle: Any, mig_uuid: str | None) -> Sequence[ProcessMemory] | None:
    """One pid can stand in several of the lists, each time with all the memory of the process."""
    compute = _list(door, handle, "Compute")
    if compute is None:
        return None
    others = (row for kind in _OTHER_KINDS for row in _list(door, handle, kind) or ())
    return [
        ProcessMemory(pid, used, mig_uuid) for pid, used in _merged([*compute, *others]).items()
    ]


def _list(door: Door, handle: Any, kind: str) -> Sequence[Any] | None:
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    found: Sequence[Any] | None = door.ask_first((f"{name}_v3", f"{name}_v2"), handle)
    return found


def _merged(rows: Iterable[Any]) -> dict[int, int | None]:
    merged: dict[int, int | None] = {}
    for row in rows:
        used, known = real(row.usedGpuMemory), merged.get(row.pid)
        merged[row.pid] = known if used is None else max(used, known or 0)
    return merged


def utilization(door: Door, handle: Any, now: float) -> Mapping[int, ProcessUtilization] | None:
    """nvmlDeviceGetProcessUtilization: the newest sample of each process in the ten seconds before `now` (Unix).

    The window does not depend on who asked before, so that two Prometheus servers see the same.
    """
    since = int((now - UTILIZATION_WINDOW_SECONDS) * 1e6)
    samples = door.ask("nvmlDeviceGetProcessUtilization", handle, since)
    if samples is None:
        return None
    newest = {sample.pid: sample for sample in sorted(samples, key=_time) if _time(sample) > since}
    return {
        pid: ProcessUtilization(_share(row.smUtil), _share(row.memUtil))
        for pid, row in newest.items()
    }


def _time(sample: Any) -> int:
    return int(sample.timeStamp)


def _share(percent: int) -> float | None:
    """A ratio; more than 100 % is a row that the driver did not fill in."""
    return percent / 100 if percent <= 100 else None
