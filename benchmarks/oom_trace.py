"""Measure `capture_on_oom="trace"`: its cost for an allocation, in memory, and at an OOM.

    python -m torchmem.phantom --memory 4GiB -- python -m benchmarks.oom_trace   # or on a GPU

CPU time in turns with and without, in one process. The OOM comes when the ring of entries is full.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from torchmem import sdk
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX
from torchmem.sdk.capture.recorded_history import OOM_TRACE_ENTRIES, RecordedHistory
from torchmem.sdk.pytorch.backend import TorchBackend

ALLOCATIONS = 20_000
TURNS = 9
# Of an allocation that is freed at once: allocated, free requested, free completed.
ENTRIES_EACH = 3


def allocate(count: int) -> float:
    """Return the CPU seconds of an allocation that is freed at once."""
    import torch

    started = time.thread_time()
    for _ in range(count):
        torch.empty(1000, device="cuda")
    return (time.thread_time() - started) / count


def resident_bytes() -> int:
    """Return this process's memory on the host."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def more_for_an_allocation() -> list[float]:
    """Return the additional CPU seconds of an allocation while entries are recorded."""
    history = RecordedHistory(TorchBackend(), dict)
    more = []
    for _ in range(TURNS):
        without = allocate(ALLOCATIONS)
        assert history.start_trace()
        more.append(allocate(ALLOCATIONS) - without)
        history.stop()
    return more


def main() -> None:
    """Print the costs."""
    import torch

    allocate(ALLOCATIONS)
    more = more_for_an_allocation()
    print(f"an allocation: {1e6 * statistics.median(more):.1f} us more")
    with tempfile.TemporaryDirectory() as folder:
        session = sdk.instrument(run_dir=folder, capture_on_oom="trace")
        before = resident_bytes()
        allocate(OOM_TRACE_ENTRIES // ENTRIES_EACH)
        print(f"host memory: {(resident_bytes() - before) / 2**20:.0f} MiB")
        started = time.thread_time()
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            print(f"an OOM: {time.thread_time() - started:.1f} s")
            highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(f"host memory at its highest: {(highest - before) / 2**20:.0f} MiB")
        (path,) = Path(folder).rglob(f"*{OOM_RECORDING_SUFFIX}")
        print(f"file: {path.stat().st_size / 2**20:.0f} MiB")
        session.close()


if __name__ == "__main__":
    main()
