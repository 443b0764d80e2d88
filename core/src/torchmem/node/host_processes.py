"""Host memory of the ranks as this node's kernel shows it, and what killed ranks.

A rank reports its own host memory. The exporter reads newer values where it sees the process, and
remembers how many processes the kernel's OOM killer had ended while the rank was alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.core import Metric

from torchmem.host.host_memory import (
    CGROUPS,
    MemoryGroup,
    MemoryLimit,
    machine_limits,
    memory_within,
    node_oom_kills,
)
from torchmem.host.process_table import ProcessKey, process_key
from torchmem.host.procfs import PROC
from torchmem.metrics import catalog
from torchmem.metrics.families import Labels, keyed_family
from torchmem.node.published import KILL_CAUSES, KillCause, Published
from torchmem.sample.sample import LIVE_STATES, HostMemory


@dataclass(frozen=True, slots=True)
class _Kills:
    """OOM kills at one moment: in the control group of a process, and on the node."""

    group: MemoryGroup | None
    in_group: int | None
    on_node: int | None

    def cause_of_kill(self, on_node: int | None) -> KillCause | None:
        """Return what killed the process since then; None if unknown.

        The group's own count decides. Without it, a kill elsewhere on the node proves nothing.
        """
        in_group = self.group.oom_kills() if self.group else None
        if self.in_group is not None and in_group is not None:
            return "host_memory" if in_group > self.in_group else "signal"
        return "signal" if self.on_node is not None and on_node == self.on_node else None


_UNKNOWN = _Kills(None, None, None)


class HostProcesses:
    """Follows the processes from scrape to scrape."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._alive: dict[ProcessKey, _Kills] = {}
        self._causes: dict[ProcessKey, KillCause | None] = {}

    def update(self, published: Iterable[Published]) -> list[Published]:
        """Return the processes with their newest host memory."""
        on_node = node_oom_kills(self._proc)
        groups = _Groups(self._proc, self._cgroups)
        alive: dict[ProcessKey, _Kills] = {}
        causes: dict[ProcessKey, KillCause | None] = {}
        result = []
        for item in published:
            key = process_key(item.sample.process)
            if item.attributed and item.state in LIVE_STATES:
                known = self._alive.get(key, _UNKNOWN).group
                group = known or groups.of(item.pid)
                kills = _Kills(group, groups.oom_kills(group), on_node)
                host = memory_within(item.pid, groups.limits(group), self._proc)
                # Without a value the process has ended since, so its end may be counted already.
                alive[key] = kills if host else self._alive.get(key, _UNKNOWN)
                result.append(_with_memory(item, host))
                continue
            if item.state == "killed":
                causes[key] = self._cause(key, on_node)
            result.append(item)
        self._alive, self._causes = alive, causes
        return result

    @property
    def kill_causes(self) -> Mapping[ProcessKey, KillCause]:
        """What killed the processes of the last `update`, if known."""
        return {key: cause for key, cause in self._causes.items() if cause}

    def families(self, published: Sequence[Published]) -> Iterator[Metric]:
        """Yield the known causes of death of the processes of the last `update`."""
        rows: list[tuple[Labels, Mapping[KillCause, float]]] = []
        for item in published:
            known = self._causes.get(process_key(item.sample.process))
            if item.state == "killed" and known:
                rows.append(
                    (item.view({}).labels, {cause: float(cause == known) for cause in KILL_CAUSES})
                )
        yield keyed_family(catalog.KILL_CAUSE, rows, dict)

    def _cause(self, key: ProcessKey, on_node: int | None) -> KillCause | None:
        if key in self._causes:
            return self._causes[key]
        before = self._alive.get(key)
        return before.cause_of_kill(on_node) if before else None


class _Groups:
    """The control groups of processes at one moment; those that share one read it once."""

    def __init__(self, proc: Path, cgroups: Path) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._limits: dict[MemoryGroup | None, Sequence[MemoryLimit]] = {None: ()}
        self._oom_kills: dict[MemoryGroup | None, int | None] = {None: None}

    def of(self, pid: int) -> MemoryGroup | None:
        """Return the group of a process, or None if it is not visible."""
        return MemoryGroup.of(pid, self._proc, self._cgroups)

    def limits(self, group: MemoryGroup | None) -> Sequence[MemoryLimit]:
        """Return the limits of a group and of the machine; none for an unknown group."""
        if group not in self._limits and group:
            self._limits[group] = (*group.limits(), *machine_limits(self._proc))
        return self._limits[group]

    def oom_kills(self, group: MemoryGroup | None) -> int | None:
        """Return how many processes of the group the OOM killer has ended."""
        if group not in self._oom_kills and group:
            self._oom_kills[group] = group.oom_kills()
        return self._oom_kills[group]


def _with_memory(item: Published, host: HostMemory | None) -> Published:
    """Replace the host memory of the sample by what is visible here."""
    if host is None:
        return item
    if host.limit_bytes is None and item.sample.host:
        host = replace(item.sample.host, rss_bytes=host.rss_bytes)
    return replace(item, sample=replace(item.sample, host=host))
