"""GPU memory of processes that are gone: NVML lists them, and the kernel has no such process.

NVML lists processes a moment before the kernel is asked, and the driver frees the memory of a
process while it ends. So a process counts as dead only if it is gone in two readings that are
MIN_SECONDS apart. Process ids from MAX_PID on are not the kernel's, and clients of MPS may
have those of another pid namespace: nothing is said about them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.exporter.subjects.processes import Processes, bytes_by_pid
from torchmem.host.process_table import is_gone
from torchmem.metrics import catalog
from torchmem.metrics.families import family
from torchmem.node.gpu_holders import DeadProcess
from torchmem.node.published import Published
from torchmem.sample.sample import LIVE_STATES, MAX_PID

MIN_SECONDS = 10.0

Facts: TypeAlias = Mapping[str, str]
_Listed: TypeAlias = tuple[str, int]
"""UUID of the GPU, and pid."""


class DeadProcesses:
    """Follows the processes from reading to reading.

    `gone` tells whether a process is gone; `clock` returns seconds that never go back.
    """

    def __init__(
        self,
        gone: Callable[[int], bool] = is_gone,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gone, self._clock = gone, clock
        self._gone_since: dict[_Listed, float] = {}
        self._dead: frozenset[_Listed] = frozenset()
        self._facts: dict[int, Facts] = {}
        self._reading: Reading | None = None

    def update(
        self,
        reading: Reading,
        facts: Mapping[int, Facts],
        published: Sequence[Published],
    ) -> Mapping[str, Sequence[DeadProcess]]:
        """Return the dead processes of each GPU whose processes are known, by its UUID.

        `facts`: what is known of the processes that live, by pid; it is kept for when they are
        dead. `published` tells who a process was that died before. NVML's pids must be the
        exporter's.
        """
        now = self._clock()
        is_later, self._reading = reading is not self._reading, reading
        used = {gpu.uuid: _used(processes) for gpu, processes in reading.values(Processes)}
        listed = {(uuid, pid) for uuid, sizes in used.items() for pid in sizes}
        gone = {each: self._gone_since.get(each, now) for each in listed if self._gone(each[1])}
        late = {each for each, since in gone.items() if now - since >= MIN_SECONDS}
        self._dead = frozenset((late if is_later else self._dead) & gone.keys())
        # A GPU that does not respond now keeps what was seen of it.
        unread = {each: at for each, at in self._gone_since.items() if each[0] not in used}
        self._gone_since = gone | unread
        self._remember(facts, {pid for _, pid in (*listed, *unread)})
        ended = _ended(reading, published) if self._dead else {}
        return {uuid: self._on_gpu(uuid, sizes, ended) for uuid, sizes in used.items()}

    def _remember(self, facts: Mapping[int, Facts], pids: set[int]) -> None:
        known = self._facts | {pid: found for pid, found in facts.items() if found}
        self._facts = {pid: found for pid, found in known.items() if pid in pids}

    def _on_gpu(
        self, uuid: str, sizes: Mapping[int, int], ended: Mapping[_Listed, Facts]
    ) -> Sequence[DeadProcess]:
        dead = [
            DeadProcess(pid, size, self._facts.get(pid) or ended.get((uuid, pid), {}))
            for pid, size in sizes.items()
            if (uuid, pid) in self._dead
        ]
        return sorted(dead, key=lambda process: (-process.bytes, process.pid))


def _used(processes: Processes) -> Mapping[int, int]:
    """Return the known bytes of the processes that may be looked up, by pid."""
    sizes = bytes_by_pid(processes.listed)
    return {
        pid: size
        for pid, size in sizes.items()
        if size and pid < MAX_PID and pid not in processes.mps_pids
    }


def _ended(reading: Reading, published: Sequence[Published]) -> Mapping[_Listed, Facts]:
    """Return user, rank, run and launch of processes that have ended; of one pid, the newest."""
    namespace = reading.nvml.pid_namespace()
    return {
        (device.uuid or "", item.pid): {"uid": str(item.uid), **item.rank_labels()}
        for item in sorted(published, key=lambda item: item.sample.timestamp)
        if item.state not in LIVE_STATES and item.sample.process.pid_namespace == namespace
        for device in item.sample.devices
    }


def dead_families(dead: Mapping[str, Sequence[DeadProcess]], reading: Reading) -> Iterator[Metric]:
    """Yield the bytes of the dead processes of each GPU, 0 if there is none."""
    rows = [
        (gpu.labels, sum(process.bytes for process in dead[gpu.uuid]))
        for gpu, _ in reading.values(Processes)
        if gpu.uuid in dead
    ]
    yield family(catalog.NVML_DEAD_PROCESS_MEMORY, rows)
