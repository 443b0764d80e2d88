"""Processes that do nothing, for tests and benchmarks that need living pids."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def idle_processes(count: int) -> Iterator[list[int]]:
    """Start processes and yield their pids."""
    running = [subprocess.Popen(["sleep", "3600"]) for _ in range(count)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
