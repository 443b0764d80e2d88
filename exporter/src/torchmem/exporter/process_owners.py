"""The owner of a process, as the kernel shows it: name, user, container, pod, job and unit.

Command lines and environments are never read, because they can hold secrets.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

from torchmem.exporter.slurm_jobs import SLUID
from torchmem.exporter.worker import JobThread
from torchmem.host.procfs import PROC, owner, read_file
from torchmem.sample.untrusted import sanitize_text

_USER_LOOKUP_SECONDS = 0.5
# Docker, Podman and Kubernetes create these in a container, whose user database is the image's.
_CONTAINER_FILES = (
    Path("/.dockerenv"),
    Path("/run/.containerenv"),
    Path("/var/run/secrets/kubernetes.io"),
)
# docker-ID.scope, cri-containerd-ID.scope, crio-ID.scope, libpod-ID.scope, or the plain ID of the
# cgroupfs driver. The last ID of a path is the innermost: Kubernetes in Docker nests them.
_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
# kubepods-burstable-podUID.slice with underscores (systemd driver), kubepods/burstable/podUID
# (cgroupfs driver); the UID of a static pod is a hash without dashes.
_POD = re.compile(
    r"kubepods.*pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)
# Version 1: slurm/uid_1000/job_7/..., or slurm_NODE with several nodes on one machine. Version 2:
# system.slice/slurmstepd.scope/job_7/..., or NODE_slurmstepd.scope.
# https://slurm.schedmd.com/cgroup_v2.html. From 26.05 on, the SLUID instead of job_7.
_SLURM = re.compile(
    r"(?P<above>.*?)"
    r"(?:/slurm(?:_[^/]+)?/uid_\d+|/system\.slice/(?:[^/]+_)?slurmstepd\.scope)"
    rf"/(?:job_(?P<id>\d+)|(?P<sluid>{SLUID}))(?P<end>)(?:/|$)"
)
# Above the exporter's cgroup namespace (cgroup_namespaces(7)). No control group has this name.
_OUTSIDE_NAMESPACE = re.compile(r"(?:/\.\.)*")
# The innermost service, also below user@1000.service. systemd escapes names as \x2d.
_UNIT = re.compile(r".*/(?!user@)([\w.:@\\-]{1,247}\.service)(?=/|$)", re.ASCII)
_KEPT_TEXTS = 128  # of processes on GPUs, which seldom change their control groups
_CGROUPS = Path("/sys/fs/cgroup")
_ROOT = 0


class ProcessOwners:
    """Reads the owners of processes: name, user, container, pod, Slurm job and systemd unit.

    `user_name` looks up a user ID; by default it asks the user database, except in a container,
    where the answer could name a different user than on the host.
    """

    def __init__(
        self, proc: Path = PROC, user_name: Callable[[int], str | None] | None = None
    ) -> None:
        self._proc = proc
        self._user_name = user_name or (_no_user_name if is_container() else _user_name)
        self._users: dict[int, str | None] = {}
        self._worker = JobThread()

    def close(self) -> None:
        """Look up no further user; the thread ends after the look-up that is running."""
        self._worker.close()

    def labels(self, pid: int) -> Mapping[str, str]:
        """Return those of name, uid, user and the labels of `cgroup_labels` that are visible.

        The mapping is empty when the process is gone.
        """
        name, uid = self._read(pid, "comm"), owner(pid, self._proc)
        if name is None or uid is None:
            return {}
        user = self._user(uid)
        user_label = {} if user is None else {"user": sanitize_text(user)}
        groups = cgroup_labels(self._read(pid, "cgroup") or "")
        return {"name": sanitize_text(name.rstrip("\n")), "uid": str(uid), **user_label, **groups}

    def _read(self, pid: int, name: str) -> str | None:
        return read_file(f"{self._proc}/{pid}/{name}")

    def _user(self, uid: int) -> str | None:
        """Return the user's name, looked up once, with a deadline.

        The user database can be a directory server that does not answer.
        """
        if uid not in self._users:
            self._worker.run(lambda: self._look_up(uid), _USER_LOOKUP_SECONDS)
        return self._users.get(uid)

    def _look_up(self, uid: int) -> None:
        self._users[uid] = self._user_name(uid)


def is_container(files: Iterable[Path] = _CONTAINER_FILES) -> bool:
    """Return whether this process runs in a container."""
    return any(file.exists() for file in files)


@lru_cache(_KEPT_TEXTS)
def cgroup_labels(text: str, cgroups: Path = _CGROUPS, root: int = _ROOT) -> Mapping[str, str]:
    """Return what the control groups name.

    That is container_id, pod_uid, slurm_job_id or slurm_sluid, and systemd_unit.

    `text` is the content of /proc/PID/cgroup, version 1 or 2. Below a container or a Slurm job, the
    unit is that of the runtime or of Slurm's daemon, so it is left out. Users can give control
    groups of their own Slurm's names, so a job counts only if the user ID `root` owns its control
    group and all above it; `cgroups` is where they are mounted.
    """
    groups = [tuple(line.split(":", 2)[1:]) for line in text.splitlines() if line.count(":") >= 2]
    paths = [path for _, path in groups]
    labels = {
        "container_id": _first(_containers(paths)),
        "pod_uid": _first(match.replace("_", "-") for match in _matches(_POD, paths)),
    }
    jobs = (_slurm_jobs(cgroups / _folder(name), path, root) for name, path in groups)
    labels |= dict(islice(chain.from_iterable(jobs), 1))
    if not any(labels.values()):
        labels["systemd_unit"] = _first(_matches(_UNIT, paths))
    return {name: value for name, value in labels.items() if value is not None}


def _containers(paths: Iterable[str]) -> list[str]:
    return [ids[-1] for path in paths if (ids := _CONTAINER.findall(path))]


def _matches(pattern: re.Pattern[str], paths: Iterable[str]) -> Iterable[str]:
    for path in paths:
        yield from pattern.findall(path)


def _folder(controllers: str) -> str:
    """Return where a hierarchy is mounted: version 1 has one for each controller or name."""
    return controllers.removeprefix("name=")


def _slurm_jobs(mounted: Path, path: str, root: int) -> Iterator[tuple[str, str]]:
    """Yield label and value of a group's job. At the top, only root can create Slurm's names."""
    match = _SLURM.match(path)
    if match and (
        _OUTSIDE_NAMESPACE.fullmatch(match["above"])
        or _belongs_to(root, mounted, path[: match.end("end")])
    ):
        yield ("slurm_job_id", match["id"]) if match["id"] else ("slurm_sluid", match["sluid"])


def _belongs_to(user: int, mounted: Path, path: str) -> bool:
    """Return whether a control group, and all above it, are visible and the user's."""
    group = mounted / path.lstrip("/")
    between = group.relative_to(mounted).parents
    try:
        owners = {(mounted / each).stat().st_uid for each in (group, *between)}
    except (OSError, ValueError):
        return False
    return ".." not in group.parts and owners == {user}


def _first(values: Iterable[str]) -> str | None:
    return next(iter(values), None)


def _no_user_name(_: int) -> None:
    return None


def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
