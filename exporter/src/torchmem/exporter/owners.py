"""What the kernel tells about the owner of a process: name, user, container, pod, job. Never its command line."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torchmem.exporter import cgroup
from torchmem.exporter.worker import Worker
from torchmem.sample.procfs import PROC, owner
from torchmem.sample.untrusted import sanitize_text

_USER_SECONDS = 0.5
# What Docker, Podman and Kubernetes leave in a container: there the user database is the image's, not the host's.
_CONTAINER_FILES = (
    Path("/.dockerenv"),
    Path("/run/.containerenv"),
    Path("/var/run/secrets/kubernetes.io"),
)


class Owners:
    """Reads /proc; `proc` is another one in tests, `user_name` what the user database says about a user id."""

    def __init__(
        self, proc: Path = PROC, user_name: Callable[[int], str | None] | None = None
    ) -> None:
        self._proc = proc
        self._user_name = user_name or (_unknown if is_container() else _user_name)
        self._users: dict[int, str | None] = {}
        self._worker = Worker()

    def facts(self, pid: int) -> Mapping[str, str]:
        """name, uid, user, container_id, pod_uid, slurm_job_id: those that can be seen; nothing when it is gone."""
        name, uid = self._read(pid, "comm"), owner(pid, self._proc)
        if name is None or uid is None:
            return {}
        user = self._user(uid)
        known_user = {} if user is None else {"user": sanitize_text(user)}
        group = cgroup.owner(self._read(pid, "cgroup") or "")
        return {"name": sanitize_text(name.rstrip("\n")), "uid": str(uid), **known_user, **group}

    def _read(self, pid: int, name: str) -> str | None:
        try:
            return (self._proc / str(pid) / name).read_text(errors="replace")
        except OSError:
            return None

    def _user(self, uid: int) -> str | None:
        """The user's name, asked once; the database may be a directory server that does not answer."""
        if uid not in self._users:
            self._worker.run(
                lambda: self._users.__setitem__(uid, self._user_name(uid)), _USER_SECONDS
            )
        return self._users.get(uid)


def is_container(files: Iterable[Path] = _CONTAINER_FILES) -> bool:
    """Whether this process runs in a container; a name from its user database could be somebody else's."""
    return any(file.exists() for file in files)


def _unknown(_: int) -> None:
    return None


def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
