"""The background thread: publishes, takes snapshots at random moments, reads statistics when no step comes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class Sampler:
    """Calls `tick` about every `interval` seconds in a daemon thread until stopped."""

    def __init__(self, tick: Callable[[], None], interval: float) -> None:
        self._tick = tick
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmem-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end, wait at most `timeout` seconds; True when it is stuck, most likely in the driver."""
        self._stop.set()
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout)
        return self._thread.is_alive()

    def _run(self) -> None:
        chance = random.Random()  # noqa: S311 - jitter, not a secret
        while not self._stop.wait(self._interval * chance.uniform(0.75, 1.25)):
            self._tick()
