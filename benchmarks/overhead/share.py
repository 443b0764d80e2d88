"""A tool's share of one core at its defaults.

Usage: `python -m benchmarks.overhead.share torchmem 2000 60 10 sleep`. Arguments: tool, blocks,
seconds, steps per second, and what the process does between its steps: `sleep` or `compute`, which
keeps a core busy and its caches filled with other data. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.overhead import tools
from benchmarks.overhead.workload import Workload, make

from torchmem.allocator.backend import Backend

WARM_UP_SECONDS = 10.0


class Counting:
    """A backend that counts its snapshots."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.snapshots = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def memory_snapshot(self) -> Any:
        """Count and take a snapshot."""
        self.snapshots += 1
        return self._backend.memory_snapshot()


def thread_cpu(name: str) -> float | None:
    """Return the CPU seconds of the thread by the kernel's clock; None without that thread."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return time.clock_gettime((~int(task.name) << 3) | 6)  # pthread_getcpuclockid's
    return None


def published(run_dir: str) -> dict[str, Any]:
    """Return the newest sample: the source of torchmem_sdk_cpu_seconds_total."""
    (path,) = Path(run_dir).rglob("*.sample.json")
    sample: dict[str, Any] = json.loads(path.read_bytes())
    return sample


def compute(seconds: float) -> None:
    """Change numbers all over a list that fills the caches, for `seconds`."""
    numbers, place, end = list(range(1 << 16)), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(200):
            place = (place * 1103515245 + 12345) % len(numbers)
            numbers[place] += 1


BETWEEN_STEPS = {"sleep": time.sleep, "compute": compute}


def steps(tool: tools.Tool, seconds: float, pause: Callable[[], None]) -> int:
    """Make steps for `seconds`, with a pause in each; return their number."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        tool.begin()
        pause()
        tool.end()
        count += 1
    return count


def measure(
    name: str, workload: Workload, seconds: float, pause: Callable[[], None]
) -> dict[str, object]:
    """Measure the process's CPU time, and torchmem's by its own account and by its thread."""
    backend = Counting(workload.backend)
    tool = tools.make(name, cast("Backend", backend), by_hand=True)
    tool.start()
    steps(tool, WARM_UP_SECONDS, pause)
    sdk_tool = tool if isinstance(tool, tools.Torchmem) else None
    before, thread = published(sdk_tool.run_dir) if sdk_tool else {}, thread_cpu("torchmem-sdk")
    snapshots, wall, cpu = backend.snapshots, time.monotonic(), time.process_time()
    count = steps(tool, seconds, pause)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    row: dict[str, object] = {"blocks": workload.blocks, "wall": wall, "cpu": cpu, "steps": count}
    row["snapshots"] = backend.snapshots - snapshots
    if sdk_tool:
        thread_after, after = thread_cpu("torchmem-sdk"), published(sdk_tool.run_dir)
        row["thread"] = (thread_after or 0) - (thread or 0)
        row["exported"] = after["cost"]["cpu_seconds"] - before["cost"]["cpu_seconds"]
        row["exported_wall"] = after["timestamp"] - before["timestamp"]
        row["snapshot_seconds"] = after["cost"]["snapshot_duration_seconds"]
    tool.stop()
    return row


if __name__ == "__main__":
    _, name, blocks, seconds, rate, between = sys.argv
    pause = partial(BETWEEN_STEPS[between], 1 / float(rate))
    print(json.dumps(measure(name, make(int(blocks)), float(seconds), pause)))
