"""Share of one core that a tool takes at its defaults: `python -m benchmarks.overhead.share torchmem 2000 60 10`.

Arguments: tool, blocks, seconds, steps per second. The process does nothing else: it sleeps between steps. Prints one
line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
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
        """One more."""
        self.snapshots += 1
        return self._backend.memory_snapshot()


def thread_cpu(name: str) -> float | None:
    """CPU seconds of the thread of that name by the kernel's clock for it; None when there is no such thread."""
    found = [thread for thread in threading.enumerate() if thread.name == name and thread.ident]
    return time.clock_gettime(time.pthread_getcpuclockid(found[0].ident or 0)) if found else None


def published(run_dir: str) -> dict[str, Any]:
    """What the SDK published last: the source of torchmem_sdk_cpu_seconds_total."""
    (path,) = Path(run_dir).glob("*.sample.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def steps(tool: tools.Tool, seconds: float, rate: float) -> int:
    """Sleep through the stretch with `rate` steps a second; returns their number."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        tool.begin()
        time.sleep(1 / rate)
        tool.end()
        count += 1
    return count


def measure(name: str, workload: Workload, seconds: float, rate: float) -> dict[str, object]:
    """CPU of the process and, for torchmem, by its own account and by its thread's clock."""
    backend = Counting(workload.backend)
    tool = tools.make(name, cast("Backend", backend), by_hand=True)
    tool.start()
    steps(tool, WARM_UP_SECONDS, rate)
    ours = tool if isinstance(tool, tools.Torchmem) else None
    before, thread = published(ours.run_dir) if ours else {}, thread_cpu("torchmem-sampler")
    snapshots, wall, cpu = backend.snapshots, time.monotonic(), time.process_time()
    count = steps(tool, seconds, rate)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    row: dict[str, object] = {"blocks": workload.blocks, "wall": wall, "cpu": cpu, "steps": count}
    row["snapshots"] = backend.snapshots - snapshots
    if ours:
        thread_after, after = thread_cpu("torchmem-sampler"), published(ours.run_dir)
        row["thread"] = (thread_after or 0) - (thread or 0)
        row["exported"] = after["cost"]["cpu_seconds"] - before["cost"]["cpu_seconds"]
        row["exported_wall"] = after["timestamp"] - before["timestamp"]
        row["snapshot_seconds"] = after["cost"]["snapshot_duration_seconds"]
    tool.stop()
    return row


if __name__ == "__main__":
    _, name, blocks, seconds, rate = sys.argv
    print(json.dumps(measure(name, make(int(blocks)), float(seconds), float(rate))))
