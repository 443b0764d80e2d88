"""The names of pods and containers on a Kubernetes node.

The kernel shows only the ID of a container and the UID of its pod. Two sources have names:

- The kubelet links the log of each container in a directory, /var/log/containers by default. The
  name of the link contains the ID of the container, so it names any process of the container, also
  on a GPU that several pods share. No log is opened.
- The kubelet's pod-resources socket lists the containers to which a device plugin assigned GPUs. It
  does not report container IDs or UIDs, so it names a process only where one pod has the GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

CONTAINER_LOGS = Path("/var/log/containers")
MAX_CONTAINER_LOGS = 8192
# POD_NAMESPACE_CONTAINER-ID: legacyLogSymlink in kubernetes/pkg/kubelet/kuberuntime/legacy.go.
# Names of Kubernetes objects are DNS names, so they contain no underscore.
_DNS_NAME = "[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_LINK = re.compile(
    rf"(?P<pod>{_DNS_NAME})_(?P<namespace>{_DNS_NAME})_(?P<container>{_DNS_NAME})"
    r"-(?P<id>[0-9a-f]{64})\.log"
)
_CLAIMED_GPU = re.compile(r"gpu-(\d{1,4})")
# Minor number of the GPU, profile without its dot, ID of the profile, and start of the placement:
# MigSpecTuple.ToCanonicalName in NVIDIA/k8s-dra-driver-gpu.
_CLAIMED_MIG = re.compile(r"gpu-(\d{1,4})-mig-[\w.-]*g[\w.-]*-(\d{1,4})-(\d{1,4})")
_REPLICA = "::"  # A shared GPU is assigned as GPU-…::0, GPU-…::1 and so on.


@dataclass(frozen=True, slots=True)
class PodContainer:
    """The names of a container, its pod and the pod's namespace; None for an unknown container."""

    pod: str
    namespace: str
    container: str | None = None

    def labels(self) -> Mapping[str, str]:
        """Return the labels of `nvml_process_info` that are known."""
        names = {"pod": self.pod, "namespace": self.namespace, "container": self.container}
        return {label: name for label, name in names.items() if name is not None}


@dataclass(frozen=True, slots=True)
class AssignedContainer:
    """A container, and what the kubelet assigned to it.

    `devices`: the IDs of a device plugin. `claimed`: the names of devices by DRA, such as gpu-0,
    whose number is that of /dev/nvidia0.
    """

    names: PodContainer
    devices: frozenset[str] = frozenset()
    claimed: frozenset[str] = frozenset()

    def uuids(
        self, minors: Mapping[int, str], placed: Mapping[tuple[str, int, int], str]
    ) -> frozenset[str]:
        """Return the UUIDs of its GPUs and MIG devices, shared or not.

        `minors`: the UUIDs of the GPUs by the number of the device. `placed`: those of the MIG
        devices by the GPU, the ID of the profile and the start of the placement.
        """
        plugin = {device.split(_REPLICA, 1)[0] for device in self.devices}
        whole = (minors.get(int(match[1])) for match in self._claims(_CLAIMED_GPU))
        parts = (
            placed.get((minors.get(int(match[1]), ""), int(match[2]), int(match[3])))
            for match in self._claims(_CLAIMED_MIG)
        )
        return frozenset(plugin | {uuid for uuid in (*whole, *parts) if uuid})

    def _claims(self, pattern: re.Pattern[str]) -> Iterable[re.Match[str]]:
        return filter(None, map(pattern.fullmatch, self.claimed))

    def has(self, uuids: AbstractSet[str]) -> bool:
        """Return whether a GPU or MIG device with one of these UUIDs, or a share of it, is its."""
        return not uuids.isdisjoint(device.split(_REPLICA, 1)[0] for device in self.devices)


@dataclass(frozen=True, slots=True)
class PodProcess:
    """A process in a pod: what its control group names, and the UUIDs of the GPUs that it uses."""

    pod_uid: str
    container_id: str | None
    gpus: frozenset[str]


class PodNames:
    """Finds the names of processes in pods; `assigned` lists the pods that have GPUs.

    Without a source, the names are unknown.
    """

    def __init__(
        self,
        container_logs: Path = CONTAINER_LOGS,
        assigned: Callable[[], Sequence[AssignedContainer]] = tuple,
    ) -> None:
        self._container_logs = container_logs
        self._assigned = assigned

    def labels(self, processes: Mapping[int, PodProcess]) -> Mapping[int, Mapping[str, str]]:
        """Return the labels pod, namespace and container by pid, for those that are known."""
        if not processes:
            return {}
        by_id = logged_containers(self._container_logs)
        found = {
            pid: by_id[process.container_id]
            for pid, process in processes.items()
            if process.container_id in by_id
        }
        if len(found) < len(processes):
            found = {**_by_gpu(processes, self._assigned()), **found}
        return {pid: names.labels() for pid, names in found.items()}


def logged_containers(directory: Path) -> Mapping[str | None, PodContainer]:
    """Return the containers by ID whose logs are linked in `directory`; empty if it is missing.

    The kubelet truncates a name of more than 255 bytes, and with it the ID: it does not match.
    """
    try:
        with os.scandir(directory) as entries:
            links = [_LINK.fullmatch(entry.name) for entry in islice(entries, MAX_CONTAINER_LOGS)]
    except OSError:
        return {}
    return {
        link["id"]: PodContainer(link["pod"], link["namespace"], link["container"])
        for link in links
        if link
    }


def _by_gpu(
    processes: Mapping[int, PodProcess], assigned: Sequence[AssignedContainer]
) -> Mapping[int, PodContainer]:
    """Return the names of the processes whose GPUs are assigned to a single pod.

    The processes on those GPUs must be in a single pod too: a pod can use a GPU without an
    assignment, as monitoring does, and must not get the name of the pod that has it.
    """
    found = {}
    for pid, process in processes.items():
        containers = [container for container in assigned if container.has(process.gpus)]
        users = {other.pod_uid for other in processes.values() if other.gpus & process.gpus}
        names = _single_pod([container.names for container in containers])
        if names and users == {process.pod_uid}:
            found[pid] = names
    return found


def _single_pod(containers: Iterable[PodContainer]) -> PodContainer | None:
    """Return the pod of all containers, with the container if there is only one."""
    unique = set(containers)
    pods = {(names.pod, names.namespace) for names in unique}
    if len(pods) != 1:
        return None
    return unique.pop() if len(unique) == 1 else PodContainer(*pods.pop())
