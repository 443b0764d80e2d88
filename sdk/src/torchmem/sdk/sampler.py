"""The background thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from torchmem.sample.native_threads import Lock, Thread
from torchmem.sdk.safety.cost import (
    AWAITED_PAUSE_SECONDS,
    FIRST_PAUSE_SECONDS,
    MIN_PAUSE_SECONDS,
    TICK_BUDGET,
    CpuMeter,
    routine_pause,
)
from torchmem.sdk.settings import MAX_SECONDS


class Sampler:
    """A daemon thread that calls `tick` about every `interval` seconds and meters its CPU time.

    The first call comes earlier, to read what the process holds on its devices before NCCL and
    other libraries take more. The pause after a tick that returns True is short.
    """

    def __init__(self, tick: Callable[[], bool], interval: float, meter: CpuMeter) -> None:
        self._tick = tick
        self._interval = interval
        self._meter = meter
        # Held until `stop`. Waiting for a lock is much cheaper than waiting for an Event.
        self._running = Lock()
        self._is_ticking = False
        self._thread = Thread(self._run, "torchmem-sdk")

    def start(self) -> None:
        """Start the thread, also after an interrupted start."""
        if not self._thread.is_alive():
            self._running.acquire(blocking=False)
            self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end and wait up to `timeout` seconds; return True if it is stuck.

        A thread that is stuck in a tick most likely waits in the driver. One that is late outside
        of a tick waits for a processor, and begins no other.
        """
        if self._running.locked():
            self._running.release()
        if self._thread.is_current():
            return False
        self._thread.join(timeout)
        return self._thread.is_alive() and self._is_ticking

    def _run(self) -> None:
        generator = random.Random()  # noqa: S311 - jitter, not a secret
        counted, pause = 0.0, min(self._interval, FIRST_PAUSE_SECONDS)
        while not self._running.acquire(timeout=pause * generator.uniform(0.75, 1.25)):
            self._is_ticking = True
            is_awaited = self._tick()
            self._is_ticking = False
            total = time.thread_time()  # since the thread started, so that waking up is included
            spent, counted = total - counted, total
            self._meter.add(spent)
            pause = routine_pause(self._interval, spent, TICK_BUDGET)
            if is_awaited:
                pause = min(pause, AWAITED_PAUSE_SECONDS)
            pause = min(max(pause, MIN_PAUSE_SECONDS), MAX_SECONDS)  # what a lock accepts
