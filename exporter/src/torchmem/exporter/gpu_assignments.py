"""Which GPUs the kubelet or Slurm has given to whom, and how long those without a process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

from prometheus_client.core import Metric

from torchmem.exporter.pod_names import AssignedContainer
from torchmem.exporter.reading import Reading
from torchmem.exporter.slurm_jobs import SlurmJob
from torchmem.exporter.subjects.processes import Processes
from torchmem.host.procfs import PROC
from torchmem.metrics import catalog
from torchmem.metrics.families import family, info
from torchmem.node.gpu_holders import Assignment

_UUID = re.compile(r"^GPU UUID:\s*(\S+)$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)

POD_SECONDS = 30.0
Holder = tuple[str, Mapping[str, str]]
"""The UUID of a GPU, and the labels of who was given it."""
Pods = Callable[[], Sequence[AssignedContainer]]


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
    ) -> Mapping[str, Assignment]:
        """Return the assignments of the GPUs whose processes are known, by UUID.

        `facts`: of the processes, by pid.
        """
        now, minors = self._clock(), minor_numbers(self._proc)
        listed = {
            gpu.uuid: {row.pid for row in processes.listed}
            for gpu, processes in reading.values(Processes)
        }
        of_jobs = _of_jobs(jobs, minors)
        trusted = of_jobs if _are_right(of_jobs, listed, facts) else []
        holders = [*_of_pods(self._assigned(now), minors), *trusted]
        found: dict[str, Assignment] = {}
        since: dict[tuple[str, str], float] = {}
        for gpu, pids in listed.items():
            own = tuple(labels for uuid, labels in holders if uuid == gpu)
            if own:
                key = gpu, repr(own)
                if not pids:
                    since[key] = self._empty_since.get(key, now)
                found[gpu] = Assignment(own, now - since.get(key, now))
        self._empty_since = since
        return found

    def _assigned(self, now: float) -> Sequence[AssignedContainer]:
        """Return the containers, as the kubelet listed them at most POD_SECONDS ago."""
        if self._containers is None or now - self._containers[0] >= POD_SECONDS:
            self._containers = now, self._pods()
        return self._containers[1]


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


def _of_pods(containers: Sequence[AssignedContainer], minors: Mapping[int, str]) -> list[Holder]:
    """Return the UUIDs of whole GPUs that containers have, with their names."""
    return [
        (uuid, container.names.labels())
        for container in containers
        for uuid in sorted(container.whole_gpus(minors))
    ]


def _of_jobs(jobs: Mapping[str, SlurmJob], minors: Mapping[int, str]) -> list[Holder]:
    return [
        (minors[minor], job.labels())
        for job in jobs.values()
        for minor in sorted(job.gpus)
        if minor in minors
    ]


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


def assignment_families(assigned: Mapping[str, Assignment], reading: Reading) -> Iterator[Metric]:
    """Yield who has each GPU, and how long it has been without a process."""
    rows = [
        (gpu.labels, assigned[gpu.uuid])
        for gpu, _ in reading.values(Processes)
        if gpu.uuid in assigned
    ]
    holders = [(labels, each) for labels, found in rows for each in found.holders]
    yield info(catalog.NVML_GPU_ASSIGNMENT_INFO, holders)
    seconds = [(labels, found.empty_seconds) for labels, found in rows]
    yield family(catalog.NVML_GPU_ASSIGNED_EMPTY, seconds)
