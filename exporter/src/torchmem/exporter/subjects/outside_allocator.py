"""Memory of a rank outside PyTorch's allocator: NVML's bytes of the process minus reserved bytes.

The SDK reads the allocator up to some seconds before a scrape reads NVML, and in between a training
can allocate or free many GiB. A difference is only taken if both sides are from the same moment,
and is held until the next one. The difference at the SDK's first read of a device is kept as the
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.core import Metric

from torchmem.allocator.outside_memory import is_limited, unbacked_bytes
from torchmem.explain.parts import known_components
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.reading import Reading
from torchmem.exporter.subjects import mig
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.host.process_table import process_key
from torchmem.metrics import catalog
from torchmem.metrics.families import family, value_family
from torchmem.node.published import DeviceProcess, Published
from torchmem.sample.run_directory import DEFAULT_TTL_SECONDS
from torchmem.sample.sample import ASLEEP, LIVE_STATES, DeviceSample

_SAME_BYTES = 32 << 20
"""A smaller difference in free memory is ignored. A CUDA context is about 500 MiB."""
_KEPT_SCRAPES = 4
"""A rank publishes its first read some time later, and an open live page collects every second."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """A process on one GPU or MIG device, as NVML reports it.

    used_bytes: of the process.
    free_bytes: of the device when its processes were listed; None if unknown.
    is_alone: whether NVML lists no other process on the device.
    card_bytes: of the GPU, without what the driver keeps for itself; None if unknown.
    """

    used_bytes: int
    free_bytes: int | None
    is_alone: bool
    card_bytes: int | None = None

    @property
    def available_bytes(self) -> int | None:
        """What the process holds or could take, which its own allocations do not change."""
        return None if self.free_bytes is None else self.used_bytes + self.free_bytes


@dataclass(frozen=True, slots=True)
class _Scrape:
    """What an earlier scrape, which ended at `time` (Unix seconds), found of a process."""

    time: float
    use: ProcessUse
    device: DeviceSample


@dataclass(frozen=True, slots=True)
class _Occupants:
    """The processes that a scrape, which ended at `time` (Unix seconds), found on a GPU.

    available_bytes: what they hold or could take.
    """

    time: float
    pids: frozenset[int]
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _Outside:
    """Bytes outside the allocator, and when its statistics were read (Unix seconds).

    unbacked: reserved bytes that are not on the device. Reserved bytes plus `size` minus `unbacked`
        are NVML's bytes of the process; without `unbacked`, of the same moment.
    """

    size: int
    timestamp: float
    unbacked: int = 0

    def backed_by(self, used: int, reserved: int) -> _Outside:
        """Return it with no more unbacked bytes than NVML's bytes of the process leave now.

        An engine may have taken them again, and its SDK not have read since.
        """
        return replace(self, unbacked=min(self.unbacked, max(0, self.size + reserved - used)))


@dataclass(frozen=True, slots=True)
class _Row:
    """A process on a device, by its labels, with what is known of it."""

    labels: tuple[str, ...]
    outside: _Outside | None
    start: int | None
    managed: int = 0


@dataclass(frozen=True, slots=True)
class OutsideBytes:
    """What one scrape knows.

    by_process: the bytes outside the allocator; below zero, that many reserved bytes are not on
        the device.
    uses: what NVML reports of each process, by the device's UUID and the pid.
    managed: managed memory that is on the device, which NVML counts to no process.
    """

    rows: Sequence[_Row] = ()
    by_process: Mapping[DeviceProcess, int] = field(default_factory=dict)
    uses: Mapping[tuple[str, int], ProcessUse] = field(default_factory=dict)
    managed: Mapping[DeviceProcess, int] = field(default_factory=dict)

    @property
    def with_managed(self) -> Mapping[DeviceProcess, int]:
        """The bytes outside the allocator by process, with managed memory."""
        return {key: size + self.managed.get(key, 0) for key, size in self.by_process.items()}

    @property
    def held(self) -> Mapping[tuple[str, int], int]:
        """NVML's bytes of each process, by the device's UUID and the pid."""
        return {key: use.used_bytes for key, use in self.uses.items()}


def outside_families(found: OutsideBytes, *, all_series: bool = True) -> Iterator[Metric]:
    """Yield the bytes outside the allocator by GPU and rank; with all series, also their times."""
    known = [
        (row.labels, replace(row.outside, size=row.outside.size + row.managed))
        for row in found.rows
        if row.outside
    ]
    rows = [(labels, outside) for labels, outside in known if outside.timestamp]
    yield value_family(catalog.OUTSIDE_ALLOCATOR, rows, lambda outside: outside.size)
    if all_series:
        yield value_family(catalog.OUTSIDE_ALLOCATOR_TIMESTAMP, rows, lambda item: item.timestamp)
    unbacked = [(labels, outside.unbacked) for labels, outside in known if outside.unbacked]
    yield family(catalog.RESERVED_UNBACKED, unbacked)
    starts = [(row.labels, row.start) for row in found.rows if row.start is not None]
    yield family(catalog.OUTSIDE_ALLOCATOR_START, starts)


class OutsideAllocator:
    """Keeps what earlier scrapes found. A process that ended is forgotten.

    The start, which is found once or never, is kept while a process is missing for a short time, as
    when its file cannot be read.
    """

    def __init__(self) -> None:
        self._scrapes: dict[DeviceProcess, _Scrape] = {}
        self._held: dict[DeviceProcess, _Outside] = {}
        self._starts: dict[DeviceProcess, int] = {}
        self._seen: dict[DeviceProcess, float] = {}
        self._occupants: Sequence[Mapping[str, _Occupants]] = ()
        self._reading: Reading | None = None

    def update(
        self,
        reading: Reading,
        published: Sequence[Published],
        gpus: Mapping[str, GpuIdentity],
        now: float,
    ) -> OutsideBytes:
        """Return what this scrape knows, and keep it for the next one.

        `gpus`: by UUID, also those of MIG devices; `now`: after both sides were read, in Unix
        seconds. NVML's pids must be the exporter's. A row is left out when either side is unknown,
        when the process of the sample is not certain, and before the first time that both sides
        were of one moment.
        """
        indices = {uuid: str(gpu.index) for uuid, gpu in gpus.items()}
        uses = uses_by_process(reading)
        # A reading that was not complete yet at the previous call is not a later one now.
        is_later, self._reading = reading is not self._reading, reading
        earlier = self._occupants if is_later else self._occupants[:-1]
        self._occupants = (*earlier, _occupants_by_gpu(reading, now))[-_KEPT_SCRAPES:]
        rows: list[_Row] = []
        keys: set[DeviceProcess] = set()
        unclaimed = {gpu.uuid: each.unattributed for gpu, each in reading.values(Processes)}
        managed: dict[DeviceProcess, int] = {}
        for item, device, use in live_devices(published, uses):
            key = device.uuid or "", process_key(item.sample.process)
            keys.add(key)
            if use is None:
                outside = self._beyond(key, device)
            else:
                outside = self._join(key, use, device, now, is_later=is_later)
            before = [occupants.get(key[0]) for occupants in earlier]
            start = self._start(key, use, device, item.pid, before) if use else None
            if outside and device.managed_bytes and unclaimed.get(key[0]):
                managed[key] = min(device.managed_bytes, unclaimed[key[0]] or 0)
                unclaimed[key[0]] = (unclaimed[key[0]] or 0) - managed[key]
            labels = item.view(indices).device_labels(device)
            rows.append(_Row(labels, outside, start, managed.get(key, 0)))
        self._forget_all_but(keys, now)
        by_process = {key: held.size - held.unbacked for key, held in self._held.items()}
        return OutsideBytes(rows, by_process, uses, managed)

    def _join(
        self,
        key: DeviceProcess,
        use: ProcessUse,
        device: DeviceSample,
        now: float,
        *,
        is_later: bool,
    ) -> _Outside | None:
        """Return the difference of this moment, else the latest one; None if a side is unknown.

        A little below zero is the time between two readings. What an engine says is asleep is not
        on the device.
        """
        timestamp, before = device.stats_timestamp, self._scrapes.get(key)
        if device.allocator is None or timestamp is None:
            return None
        if before is None or timestamp >= before.time or use != before.use:
            self._scrapes[key] = _Scrape(now, use, device)
        size = outside_bytes(use, device, before if is_later else None)
        asleep = device.engine.asleep_bytes if device.engine else 0
        if size is not None and size + asleep >= 0:
            self._held[key] = _Outside(size + asleep, timestamp, asleep)
        elif size is not None and size < -_SAME_BYTES:
            known = self._held.get(key, _Outside(0, 0.0))
            self._held[key] = replace(known, unbacked=known.size - size)
        elif device.engine and key in self._held:
            self._held[key] = replace(self._held[key], unbacked=asleep)
        elif key in self._held:
            self._held[key] = self._held[key].backed_by(
                use.used_bytes, device.allocator.reserved_bytes.total
            )
        return self._held.get(key)

    def _beyond(self, key: DeviceProcess, device: DeviceSample) -> _Outside | None:
        """Return how many reserved bytes are not on the device at least, without NVML's bytes.

        They are what an engine says is asleep. Under WSL, Windows also moves what does not fit to
        the host's memory.
        """
        asleep = known_components(device).get(ASLEEP, 0)
        unbacked = max(asleep, unbacked_bytes(device, device.driver_free_bytes) or 0)
        known = self._held.get(key)
        if unbacked:
            self._held[key] = _Outside(0, 0.0, unbacked)
            return self._held[key]
        if known is not None and not known.timestamp:
            del self._held[key]
        return None

    def _start(
        self,
        key: DeviceProcess,
        use: ProcessUse,
        device: DeviceSample,
        pid: int,
        earlier: Sequence[_Occupants | None],
    ) -> int | None:
        """Return the difference at the SDK's first read, which is found once or never."""
        if key not in self._starts:
            size = start_bytes(use, device, pid, earlier)
            if size is not None and size >= 0:
                self._starts[key] = size
        return self._starts.get(key)

    def _forget_all_but(self, keys: set[DeviceProcess], now: float) -> None:
        self._scrapes = {key: scrape for key, scrape in self._scrapes.items() if key in keys}
        self._held = {key: outside for key, outside in self._held.items() if key in keys}
        self._seen |= dict.fromkeys(keys, now)
        oldest = now - DEFAULT_TTL_SECONDS
        self._seen = {key: seen for key, seen in self._seen.items() if seen >= oldest}
        self._starts = {key: start for key, start in self._starts.items() if key in self._seen}


def live_devices(
    published: Iterable[Published], uses: Mapping[tuple[str, int], ProcessUse]
) -> Iterator[tuple[Published, DeviceSample, ProcessUse | None]]:
    """Yield the devices of live processes that are certain, with their use if NVML reports it."""
    for item in published:
        if item.attributed and item.state in LIVE_STATES:
            for device in item.sample.devices:
                yield item, device, uses.get((device.uuid or "", item.pid))


def outside_bytes(use: ProcessUse, device: DeviceSample, before: _Scrape | None) -> int | None:
    """Return NVML's bytes minus reserved bytes; None if they may be of different moments.

    They are of one moment in three cases: the device has as much free memory as when the
    statistics were read; neither side has changed since an earlier scrape; or the process is alone
    on the device, so that the difference in free memory is its own.
    """
    assert device.allocator is not None  # noqa: S101 - checked by the caller
    outside_now = use.used_bytes - device.allocator.reserved_bytes.total
    taken_since = None
    is_limit = is_limited(device, use.card_bytes)
    if use.free_bytes is not None and device.driver_free_bytes is not None and not is_limit:
        taken_since = device.driver_free_bytes - use.free_bytes
    if taken_since is not None and abs(taken_since) <= _SAME_BYTES:
        return outside_now
    if before is None or (device.stats_timestamp or 0) < before.time:
        return None
    if use.used_bytes == before.use.used_bytes and _is_unchanged(device, before.device):
        return outside_now
    if taken_since is not None and _was_alone(use, before.use):
        return outside_now - taken_since
    return None


def start_bytes(
    use: ProcessUse, device: DeviceSample, pid: int, earlier: Sequence[_Occupants | None]
) -> int | None:
    """Return NVML's bytes minus reserved bytes at the SDK's first read; None if unknown.

    They are known if that read is still the newest one and NVML is of its moment; or if no other
    process was on the device, neither in the newest of the `earlier` scrapes before that read nor
    in those after it, so that all that the driver no longer had free was of process `pid`.
    """
    first, read = device.first_read, device.allocator
    if first is None or read is None:
        return None
    newest = device.stats_timestamp, read.reserved_bytes.total, device.driver_free_bytes
    if newest == (first.timestamp, first.reserved_bytes, first.driver_free_bytes):
        size = outside_bytes(use, device, None)
        if size is not None:
            return size
    available = use.available_bytes
    if available is None or not use.is_alone or is_limited(device, use.card_bytes):
        return None
    if not _was_alone_since(first.timestamp, pid, available, earlier):
        return None
    return available - first.driver_free_bytes - first.reserved_bytes


def _was_alone_since(
    timestamp: float, pid: int, available: int, earlier: Sequence[_Occupants | None]
) -> bool:
    """Return whether all scrapes found no other process, from the last one before a time on."""
    for scrape in reversed(earlier):
        if scrape is None or not scrape.pids <= {pid}:
            return False
        if not _is_same(available, scrape.available_bytes):
            return False
        if scrape.time <= timestamp:
            return True
    return False


def _is_unchanged(device: DeviceSample, before: DeviceSample) -> bool:
    """Return whether the process has allocated and freed no device memory."""
    return device.allocator is not None and (
        (device.allocator.reserved_bytes, device.counters.device_allocs)
        == (before.allocator and before.allocator.reserved_bytes, before.counters.device_allocs)
    )


def _was_alone(use: ProcessUse, before: ProcessUse) -> bool:
    """Return whether no other process has used the device since an earlier scrape."""
    is_same = _is_same(use.available_bytes, before.available_bytes)
    return use.is_alone and before.is_alone and is_same


def _is_same(size: int | None, other: int | None) -> bool:
    """Return whether both are known and equal, apart from small differences."""
    return size is not None and other is not None and abs(size - other) <= _SAME_BYTES


def _occupants_by_gpu(reading: Reading, now: float) -> Mapping[str, _Occupants]:
    """Return each GPU's processes by UUID, without GPUs in MIG mode or with unknown bytes."""
    occupants = {}
    for gpu, processes in reading.values(Processes):
        free, listed = processes.free.get(None), processes.listed
        used = [row.used_bytes for row in listed if row.used_bytes is not None]
        if free is not None and len(used) == len(listed):
            pids = frozenset(row.pid for row in listed)
            occupants[gpu.uuid] = _Occupants(now, pids, free + sum(used))
    return occupants


def uses_by_process(reading: Reading) -> Mapping[tuple[str, int], ProcessUse]:
    """Return each process by (UUID of the GPU or name of the MIG device, pid).

    Processes whose bytes NVML does not report are left out.
    """
    names = mig.mig_names(reading)
    uses: dict[tuple[str, int], ProcessUse] = {}
    for gpu, processes in reading.values(Processes):
        rows = processes.listed
        for row in rows:
            for name in (gpu.uuid,) if row.mig_uuid is None else names.get(row.mig_uuid, ()):
                use = _use(row, rows, processes)
                if use is not None:
                    uses[name, row.pid] = use
    return uses


def _use(
    row: ProcessMemory, rows: Sequence[ProcessMemory], processes: Processes
) -> ProcessUse | None:
    """Return the use of one row; compute instances of a MIG device's GPU instance share memory."""
    if row.used_bytes is None:
        return None
    is_alone = row.mig_uuid is None and len(rows) == 1
    card = processes.memory.usable if processes.memory and row.mig_uuid is None else None
    return ProcessUse(row.used_bytes, processes.free.get(row.mig_uuid), is_alone, card)
