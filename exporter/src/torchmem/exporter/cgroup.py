"""Whose process it is, read from its control groups: container, pod, Slurm job."""

from __future__ import annotations

import re
from collections.abc import Mapping

# docker-ID.scope, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, or the plain id of the cgroupfs driver.
# The last one of a path is the innermost: Kubernetes in Docker nests them.
_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
# kubepods-burstable-podUID.slice with underscores (systemd driver), kubepods/burstable/podUID (cgroupfs driver);
# the uid of a static pod is a hash without dashes.
_POD = re.compile(
    r"kubepods.*pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)
# slurm/uid_1000/job_7/... (version 1), slurmstepd.scope/job_7/... (version 2), each perhaps with the node's name.
_SLURM = re.compile(r"/[^/]*slurm[^/]*/(?:uid_\d+/)?job_(\d+)(?:/|$)")


def owner(text: str) -> Mapping[str, str]:
    """container_id, pod_uid and slurm_job_id, those that /proc/PID/cgroup (`text`, version 1 or 2) names."""
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    found = {
        "container_id": _first(_containers(paths)),
        "pod_uid": _first(
            [match[1].replace("_", "-") for path in paths for match in _POD.finditer(path)]
        ),
        "slurm_job_id": _first([match[1] for path in paths for match in _SLURM.finditer(path)]),
    }
    return {name: value for name, value in found.items() if value is not None}


def _containers(paths: list[str]) -> list[str]:
    return [ids[-1] for path in paths if (ids := _CONTAINER.findall(path))]


def _first(found: list[str]) -> str | None:
    return found[0] if found else None
