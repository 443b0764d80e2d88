"""The background thread: publishes, takes snapshots at random moments, reads statistics when no step comes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from torchmem.sdk._cadence import affordable
from torchmem.sdk._cost import CpuMeter

# Share of wall time that ticks may take as long as that only stretches their interval.
TICK_BUDGET = 0.0001


class Sampler:
    """Calls `tick` about every `interval` seconds in a daemon thread until stopped; all that it costs is metered."""

    def __init__(self, tick: Callable[[], None], interval: float, meter: CpuMeter) -> None:
        self._tick = tick
        self._interval = interval
        self._meter = meter
        self._running = threading.Lock()  # held until `stop`; waiting for it is much cheaper than for an Event
        self._thread = threading.Thread(target=self._run, name="torchmem-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._running.acquire()
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end, wait at most `timeout` seconds; True when it is stuck, most likely in the driver."""
        if self._running.locked():
            self._running.release()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return False
        self._thread.join(timeout)
        return self._thread.is_alive()

    def _run(self) -> None:
        chance = random.Random()  # noqa: S311 - jitter, not a secret
        counted, pause = 0.0, self._interval
        while not self._running.acquire(timeout=pause * chance.uniform(0.75, 1.25)):
            self._tick()
            total = time.thread_time()  # since the thread began: waking up is part of the price
            spent, counted = total - counted, total
            self._meter.add(spent)
            pause = affordable(self._interval, spent, TICK_BUDGET)
