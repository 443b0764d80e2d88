"""Waits for events of GPUs in a thread of its own: they cannot be asked for afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torchmem.exporter.gpu import Events, GpuDownError, Nvml, NvmlCallError, NvmlDownError
from torchmem.exporter.tally import Count, Tally

_log = logging.getLogger(__name__)

SLICE_SECONDS = 0.25  # of waiting within NVML, which cannot be interrupted
_CLOSE_SECONDS = 1.0


class Watch:
    """Follows GPUs: subscribes at a reading, again after a failure or when the GPUs change; counts stay."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, Count] = {}
        self._uuids: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._supported = True
        self._closed = False

    def tallies(self) -> Mapping[str, Tally]:
        """What was counted, by GPU UUID; empty where NVML does not tell of events."""
        now = self._clock()
        with self._lock:
            return {uuid: count.tally(now) for uuid, count in self._counts.items()}

    def follow(self, nvml: Nvml, uuids: Sequence[str]) -> None:
        """In the driver's thread: see to it that these GPUs are watched; raises NvmlDownError."""
        wanted, waiting = frozenset(uuids), self._thread is not None and self._thread.is_alive()
        is_followed = wanted <= self._uuids and (waiting or not self._supported)
        self._uuids = wanted if is_followed else frozenset()
        if is_followed or self._closed or not self._ended():
            return
        try:
            events = nvml.subscribe(list(uuids))
        except (GpuDownError, NvmlCallError) as error:
            _log.warning("events are not watched until the next reading: %s", error)
            return
        self._uuids, self._supported = wanted, events is not None
        if events is not None and not self._start(events):
            events.close()

    def stop(self) -> None:
        """Ask the thread to let its subscription go; it does within `SLICE_SECONDS`."""
        self._stop.set()
        self._uuids = frozenset()

    def _ended(self) -> bool:
        """Whether the thread is gone: two at once would count an event twice, and one may hang in NVML."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * SLICE_SECONDS)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Stop for ever; returns after at most a second, also while NVML hangs."""
        with self._lock:
            self._closed = True
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _start(self, events: Events) -> bool:
        """Whether it has been started: not when it was closed while NVML was asked for the subscription."""
        with self._lock:
            if self._closed:
                return False
            for uuid, kinds in events.kinds.items():
                self._counts.setdefault(uuid, Count()).expect(kinds)
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
                event = events.wait(SLICE_SECONDS)
                if event is not None:
                    with self._lock:
                        count = self._counts.setdefault(event.uuid, Count())
                        count.add(event.name, event.xid, self._clock())
        except (GpuDownError, NvmlCallError, NvmlDownError) as error:
            _log.warning("waiting for events ended, the next reading begins anew: %s", error)
        except Exception:  # noqa: BLE001 - the thread is started again; it is logged
            _log.exception("waiting for events ended, the next reading begins anew")
        finally:
            events.close()
