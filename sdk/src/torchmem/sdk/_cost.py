"""What the SDK itself costs: CPU seconds over all threads in which its code runs."""

from __future__ import annotations

import threading


class CpuMeter:
    """A sum of CPU seconds, as differences of `time.thread_time`, safe against threads and signal handlers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.RLock()  # a signal handler may come back into the thread that holds it

    def add(self, seconds: float) -> None:
        """Count what one thread has spent."""
        with self._lock:
            self.seconds += seconds
