"""Which GPUs and MIG devices the kubelet or Slurm has given to whom, and which have no process.

The kubelet names MIG devices by UUID, DRA by their place on the GPU, and Slurm by their profile
alone: there, they are known if a job has all of that profile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.pod_names import AssignedContainer
from torchmem.exporter.reading import Reading
from torchmem.exporter.slurm_jobs import SlurmJob
from torchmem.exporter.subjects.mig import Mig, MigInstance
from torchmem.exporter.subjects.processes import Processes
from torchmem.host.procfs import PROC
from torchmem.metrics import catalog
from torchmem.metrics.families import family, info
from torchmem.node.gpu_holders import Assignment, MigDevice

_UUID = re.compile(r"^GPU UUID:\s*(\S+)$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)

POD_SECONDS = 30.0
Holder = tuple[str, Mapping[str, str]]
"""The UUID of a GPU or MIG device, and the labels of who was given it."""
Pods = Callable[[], Sequence[AssignedContainer]]


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU, or a MIG device of it, whose processes are known."""

    gpu: GpuIdentity
    pids: frozenset[int]
    mig: MigInstance | None = None

    @property
    def uuid(self) -> str:
        """Its own UUID."""
        return self.mig.uuid if self.mig else self.gpu.uuid


class Jobs(Protocol):
    """A source of the jobs on this node, by ID or SLUID."""

    def __call__(self) -> Mapping[str, SlurmJob]:
        """Return the jobs that are known."""

    def close(self) -> None:
        """Ask nothing more."""


class NoJobs:
    """Finds no jobs, because no program is configured to ask."""

    def __call__(self) -> Mapping[str, SlurmJob]:
        """Return none."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class GpuAssignments:
    """Follows the assignments from scrape to scrape.

    `pods` lists the containers with GPUs, `jobs` the jobs by ID or SLUID; `clock` returns seconds
    that never go back.
    """

    def __init__(
        self,
        pods: Pods = tuple,
        jobs: Jobs | None = None,
        proc: Path = PROC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pods, self._proc, self._clock = pods, proc, clock
        self.jobs = jobs or NoJobs()
        self._containers: tuple[float, Sequence[AssignedContainer]] | None = None
        self._empty_since: dict[tuple[str, str], float] = {}

    def close(self) -> None:
        """Stop asking."""
        self.jobs.close()

    def update(
        self,
        reading: Reading,
        facts: Mapping[int, Mapping[str, str]],
        jobs: Mapping[str, SlurmJob],
    ) -> Mapping[str, Sequence[Assignment]]:
        """Return the assignments of the GPUs whose processes are known, by UUID.

        `facts`: of the processes, by pid.
        """
        now, minors, devices = self._clock(), minor_numbers(self._proc), list(_devices(reading))
        holders = [
            *_of_pods(self._assigned(now), minors, devices),
            *_of_jobs(jobs, minors, devices, facts),
        ]
        found: dict[str, list[Assignment]] = {}
        since: dict[tuple[str, str], float] = {}
        for device in devices:
            own = tuple(labels for uuid, labels in holders if uuid == device.uuid)
            if own:
                key = device.uuid, repr(own)
                if not device.pids:
                    since[key] = self._empty_since.get(key, now)
                assigned = Assignment(own, now - since.get(key, now), _mig_device(device.mig))
                found.setdefault(device.gpu.uuid, []).append(assigned)
        self._empty_since = since
        return found

    def _assigned(self, now: float) -> Sequence[AssignedContainer]:
        """Return the containers, as the kubelet listed them at most POD_SECONDS ago."""
        if self._containers is None or now - self._containers[0] >= POD_SECONDS:
            self._containers = now, self._pods()
        return self._containers[1]


def _devices(reading: Reading) -> Iterator[_Device]:
    """Yield the MIG devices of GPUs that have some, and the other GPUs."""
    migs = {gpu.uuid: mig.instances for gpu, mig in reading.values(Mig)}
    for gpu, processes in reading.values(Processes):
        for instance in migs.get(gpu.uuid, ()):
            pids = {row.pid for row in processes.listed if row.mig_uuid == instance.uuid}
            yield _Device(gpu, frozenset(pids), instance)
        if not migs.get(gpu.uuid):
            yield _Device(gpu, frozenset(row.pid for row in processes.listed))


def _mig_device(instance: MigInstance | None) -> MigDevice | None:
    if instance is None:
        return None
    return MigDevice(instance.gpu_instance, instance.compute_instance, instance.profile)


def _of_pods(
    containers: Sequence[AssignedContainer], minors: Mapping[int, str], devices: Sequence[_Device]
) -> list[Holder]:
    """Return the UUIDs of the GPUs and MIG devices that containers have, with their names."""
    placed = {
        (device.gpu.uuid, *device.mig.placement): device.uuid
        for device in devices
        if device.mig and device.mig.placement
    }
    return [
        (uuid, container.names.labels())
        for container in containers
        for uuid in sorted(container.uuids(minors, placed))
    ]


def _of_jobs(
    jobs: Mapping[str, SlurmJob],
    minors: Mapping[int, str],
    devices: Sequence[_Device],
    facts: Mapping[int, Mapping[str, str]],
) -> list[Holder]:
    """Return what jobs have. With MIG devices, Slurm's numbers are not those of the GPUs."""
    parts = [device for device in devices if device.mig]
    if parts:
        return [
            (device.uuid, job.labels())
            for job in jobs.values()
            for profile in sorted(set(job.profiles))
            for device in _all_of(profile, job.profiles.count(profile), parts)
        ]
    whole = [
        (minors[minor], job.labels())
        for job in jobs.values()
        for minor in sorted(job.gpus)
        if minor in minors
    ]
    listed = {device.uuid: device.pids for device in devices}
    return whole if _are_right(whole, listed, facts) else []


def _all_of(profile: str, number: int, parts: Sequence[_Device]) -> Sequence[_Device]:
    """Return the MIG devices of a profile if there are not more of them than a number."""
    found = [device for device in parts if device.mig and device.mig.profile == profile]
    return found if len(found) == number else ()


def _are_right(
    of_jobs: Sequence[Holder],
    listed: Mapping[str, AbstractSet[int]],
    facts: Mapping[int, Mapping[str, str]],
) -> bool:
    """Return whether no process is on a GPU that its job does not have by Slurm's numbers.

    On such a node Slurm counts the GPUs in another order, or jobs use those of others.
    """
    given = {(uuid, labels["slurm_job_id"]) for uuid, labels in of_jobs}
    jobs = {job for _, job in given}
    used = {
        (uuid, facts.get(pid, {}).get("slurm_job_id", ""))
        for uuid, pids in listed.items()
        for pid in pids
    }
    return all(each in given for each in used if each[1] in jobs)


def minor_numbers(proc: Path = PROC) -> Mapping[int, str]:
    """Return the UUIDs of the GPUs by the number of their device, as in /dev/nvidia0.

    DRA and Slurm count by it. It is not always NVML's index.
    """
    found = {}
    for file in (proc / "driver" / "nvidia" / "gpus").glob("*/information"):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        uuid, minor = _UUID.search(text), _MINOR.search(text)
        if uuid and minor:
            found[int(minor[1])] = uuid[1]
    return found


def assignment_families(
    assigned: Mapping[str, Sequence[Assignment]], reading: Reading
) -> Iterator[Metric]:
    """Yield who has each GPU and MIG device, and how long it has been without a process."""
    rows = [
        (gpu.labels, each)
        for gpu, _ in reading.values(Processes)
        for each in assigned.get(gpu.uuid, ())
    ]
    whole = [(labels, each) for labels, each in rows if each.mig is None]
    parts = [
        ((*labels, str(each.mig.gpu_instance), str(each.mig.compute_instance)), each)
        for labels, each in rows
        if each.mig is not None
    ]
    yield info(catalog.NVML_GPU_ASSIGNMENT_INFO, _holders(whole))
    yield family(catalog.NVML_GPU_ASSIGNED_EMPTY, _seconds(whole))
    yield info(catalog.NVML_MIG_ASSIGNMENT_INFO, _holders(parts))
    yield family(catalog.NVML_MIG_ASSIGNED_EMPTY, _seconds(parts))


_Assigned: TypeAlias = Sequence[tuple[tuple[str, ...], Assignment]]


def _holders(rows: _Assigned) -> list[tuple[tuple[str, ...], Mapping[str, str]]]:
    return [(labels, holder) for labels, each in rows for holder in each.holders]


def _seconds(rows: _Assigned) -> list[tuple[tuple[str, ...], float]]:
    return [(labels, each.empty_seconds) for labels, each in rows]
