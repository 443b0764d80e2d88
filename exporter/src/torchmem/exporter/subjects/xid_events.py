"""XID errors and other GPU events, counted since the exporter started.

NVML reports an event only while a process waits for it, so a thread waits for events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from prometheus_client.core import Metric

from torchmem.exporter.gpus import Events, GpuEvent, GpuIdentity
from torchmem.exporter.nvml import (
    FUNCTION_NOT_FOUND,
    TIMEOUT,
    GpuLostError,
    NvmlCallError,
    NvmlDevice,
    NvmlDownError,
    NvmlLibrary,
    text,
)
from torchmem.metrics import catalog
from torchmem.metrics.families import keyed_family
from torchmem.sample.xids import XIDS

_log = logging.getLogger(__name__)

XID = "xid"
MAX_XIDS = 256
UNLISTED_XID_HOLD_SECONDS = 60.0
WAIT_SECONDS = 30.0
"""Of one wait within NVML, which returns at once for an event and cannot be interrupted.

A new GPU's events are watched at most this much later, because nvmlEventSetCreate spins as long as
another thread waits (seen with driver 580.159). An idle exporter wakes up this often."""
_CLOSE_SECONDS = 0.1
# nvmlEventType of nvml.h. Single-bit errors, performance states and clocks are left out: they come
# by the thousand.
_KINDS = {
    0x0002: "double_bit_ecc_error",
    0x0008: XID,
    0x0080: "power_source_change",
    0x0100: "mig_config_change",
    0x0200: "single_bit_ecc_error_storm",
    0x0400: "dram_retirement_event",
    0x0800: "dram_retirement_failure",
    0x1000: "non_fatal_poison_error",
    0x2000: "fatal_poison_error",
    0x4000: "gpu_unavailable_error",
    0x8000: "gpu_recovery_action",
}

Subscribe = Callable[[Sequence[str]], Events | None]


def subscribe(nvml: NvmlLibrary, gpus: Mapping[str, NvmlDevice]) -> NvmlEvents | None:
    """Subscribe to the events of these GPUs, by UUID; None if no GPU reports events."""
    event_set = nvml.call("nvmlEventSetCreate")
    if event_set is None:
        return None
    nvml.require("nvmlInit")
    events = NvmlEvents(nvml, event_set)
    with ExitStack() as on_failure:
        on_failure.callback(events.close)
        _, code = nvml.try_call("nvmlEventSetWait_v2", event_set, 0)
        if code == FUNCTION_NOT_FOUND:
            return None
        for uuid, gpu in gpus.items():
            events.add(uuid, gpu)
        if events.kinds:
            on_failure.pop_all()
            return events
    return None


class NvmlEvents:
    """An event set. An nvmlInit of its own keeps it valid until it is closed."""

    def __init__(self, nvml: NvmlLibrary, event_set: object) -> None:
        self._nvml = nvml
        self._set = event_set
        self.kinds: dict[str, frozenset[str]] = {}

    def add(self, uuid: str, gpu: NvmlDevice) -> None:
        """Register for the supported kinds of a GPU; skip a GPU that does not respond."""
        try:
            mask = (gpu.call("nvmlDeviceGetSupportedEventTypes") or 0) & sum(_KINDS)
            if mask and self._register(gpu, mask):
                self.kinds[uuid] = frozenset(name for bit, name in _KINDS.items() if mask & bit)
        except (GpuLostError, NvmlCallError):
            return

    def wait(self, seconds: float) -> GpuEvent | None:
        """Call nvmlEventSetWait_v2; return None also for an event of an unknown kind or GPU."""
        data, code = self._nvml.try_call("nvmlEventSetWait_v2", self._set, int(seconds * 1000))
        if code == TIMEOUT:
            return None
        if code:
            raise GpuLostError(code)
        uuid = text(self._nvml.call("nvmlDeviceGetUUID", data.device))
        name = _KINDS.get(data.eventType)
        if uuid is None or name is None:
            return None
        return GpuEvent(uuid, name, int(data.eventData) if name == XID else None)

    def close(self) -> None:
        """Free the set and undo its nvmlInit."""
        self._nvml.try_call("nvmlEventSetFree", self._set)
        self._nvml.try_call("nvmlShutdown")

    def _register(self, gpu: NvmlDevice, mask: int) -> bool:
        name = "nvmlDeviceRegisterEvents"
        _, code = self._nvml.try_call(name, gpu.handle, mask, self._set)
        self._nvml.check(name, code)
        return code == 0


@dataclass(frozen=True, slots=True)
class EventTotals:
    """Counts by XID and by event, and the time of the last error of each XID (Unix seconds)."""

    xids: Mapping[int, int]
    xid_times: Mapping[int, float]
    events: Mapping[str, int]


class EventCounter:
    """Counts the events of one GPU so that Prometheus sees every counter at 0 before it rises."""

    def __init__(self) -> None:
        self._listed_xids: frozenset[int] = frozenset()
        self._xids = Counter[int]()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._events = Counter[str]()
        self._was_exposed = False

    def expect(self, kinds: Iterable[str]) -> None:
        """Start the counters of these kinds at 0; for XID, those of `torchmem.sample.xids`."""
        for kind in kinds:
            if kind == XID:
                self._listed_xids = frozenset(XIDS)
            else:
                self._events[kind] += 0

    def add(self, event: GpuEvent, now: float) -> None:
        """Count one event at `now` (Unix seconds)."""
        xid = event.xid
        if xid is None:
            self._events[event.name] += 1
        elif xid in self._xids or len(self._xids) < MAX_XIDS:
            self._xids[xid] += 1
            self._first.setdefault(xid, now)
            self._last[xid] = now

    def totals(self, now: float) -> EventTotals:
        """Return the counts to expose at `now`.

        The first time every count is 0, and so is that of an unlisted XID for a minute, so that
        rate() does not miss the first event. Times are exposed immediately.
        """
        xids = {xid: self._xids[xid] for xid in sorted(self._listed_xids | set(self._xids))}
        exposed = {xid: 0 if self._is_held(xid, now) else count for xid, count in xids.items()}
        events = {
            name: count if self._was_exposed else 0 for name, count in sorted(self._events.items())
        }
        self._was_exposed = True
        return EventTotals(exposed, dict(self._last), events)

    def _is_held(self, xid: int, now: float) -> bool:
        is_new = now - self._first.get(xid, now) < UNLISTED_XID_HOLD_SECONDS
        return not self._was_exposed or (is_new and xid not in self._listed_xids)


class EventWatcher:
    """Waits for events in a thread. Subscribes again after a failure or when there is a new GPU.

    The counts are kept across subscriptions, of which there is one at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counters: dict[str, EventCounter] = {}
        self._uuids: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._supported = True
        self._closed = False

    def totals(self) -> Mapping[str, EventTotals]:
        """Return the counts by GPU UUID; empty where NVML does not report events."""
        now = self._clock()
        with self._lock:
            return {uuid: counter.totals(now) for uuid, counter in self._counters.items()}

    def watch(self, subscribe: Subscribe, uuids: Sequence[str]) -> None:
        """Make sure that these GPUs are watched. For the driver's thread; raises NvmlDownError."""
        gpus, is_waiting = frozenset(uuids), self._thread is not None and self._thread.is_alive()
        is_watched = gpus <= self._uuids and (is_waiting or not self._supported)
        self._uuids = gpus if is_watched else frozenset()
        if is_watched or self._closed:
            return
        self._stop.set()
        if is_waiting:
            return
        try:
            events = subscribe(list(uuids))
        except (GpuLostError, NvmlCallError) as error:
            _log.warning("events are not watched until the next reading: %s", error)
            return
        self._uuids, self._supported = gpus, events is not None
        if events is not None and not self._start(events):
            events.close()

    def stop(self) -> None:
        """End the subscription when its wait ends; an event that ends the wait still counts."""
        self._stop.set()
        self._uuids = frozenset()

    def close(self) -> None:
        """Stop permanently, without waiting for a wait in NVML, which ends with the process."""
        with self._lock:
            self._closed = True
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _start(self, events: Events) -> bool:
        """Start the thread unless the watcher was closed in the meantime; return whether it did."""
        with self._lock:
            if self._closed:
                return False
            for uuid, kinds in events.kinds.items():
                self._counters.setdefault(uuid, EventCounter()).expect(kinds)
            self._stop = threading.Event()
            arguments = (events, self._stop)
            self._thread = threading.Thread(
                target=self._wait, args=arguments, name="torchmem-events", daemon=True
            )
            self._thread.start()
            return True

    def _wait(self, events: Events, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                event = events.wait(WAIT_SECONDS)
                if event is not None:
                    self._count(event)
        except (GpuLostError, NvmlCallError, NvmlDownError) as error:
            _log.warning("waiting for events ended; the next reading starts it again: %s", error)
        except Exception:  # noqa: BLE001 - the next reading starts the thread again; it is logged
            _log.exception("waiting for events ended; the next reading starts it again")
        finally:
            events.close()

    def _count(self, event: GpuEvent) -> None:
        with self._lock:
            self._counters.setdefault(event.uuid, EventCounter()).add(event, self._clock())


def families(watcher: EventWatcher, known: Mapping[str, GpuIdentity]) -> Iterator[Metric]:
    """Yield the counts of every GPU that was ever watched, including those that are lost."""
    totals = watcher.totals()
    rows = [(known[uuid].labels, counts) for uuid, counts in totals.items() if uuid in known]
    yield keyed_family(catalog.NVML_XID_ERRORS, rows, lambda counts: counts.xids)
    yield keyed_family(catalog.NVML_XID_LAST, rows, lambda counts: counts.xid_times)
    yield keyed_family(catalog.NVML_EVENTS, rows, lambda counts: counts.events)
