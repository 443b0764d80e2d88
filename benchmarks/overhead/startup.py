"""Import time and memory of the SDK, each measured in new processes."""

from __future__ import annotations

import statistics
import subprocess
import sys

IMPORT = """
import time
import {before}
started = time.perf_counter()
import torchmem.sdk
print(time.perf_counter() - started)
"""

ON_PYTORCH = """
import torch
held = [torch.empty(4096, dtype=torch.uint8, device="cuda") for _ in range({blocks})]
held[::3] = [None] * len(held[::3])
backend = None
"""
ON_THE_SIMULATOR = """
from benchmarks.overhead.workload import make
workload = make({blocks})
backend = workload.backend
"""
# Writing 5 to clear_refs resets the high-water mark VmHWM (Documentation/filesystems/proc.rst).
MEMORY = """
import pathlib, tempfile, time
{prepare}
def kib(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
before = kib("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")
from torchmem import sdk
often = dict(interval=0.05, snapshot_interval=0.05, snapshot_budget=1.0)
session = sdk.instrument(backend=backend, run_dir=tempfile.mkdtemp(), **often)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    session.step()
    time.sleep(0.01)
highest = kib("VmHWM")
session.close()
time.sleep(3)  # until the background thread has measured its last snapshot
print(kib("VmRSS") - before, highest - before)
"""


def import_seconds(before: str, runs: int) -> float:
    """Return the median seconds of `import torchmem.sdk` after the import of `before`."""
    return statistics.median(float(_run(IMPORT.format(before=before))) for _ in range(runs))


def memory_bytes(blocks: int, seconds: float, *, cuda: bool) -> tuple[int, int]:
    """Return the growth of resident memory in `seconds` of frequent snapshots, final and peak."""
    prepare = (ON_PYTORCH if cuda else ON_THE_SIMULATOR).format(blocks=blocks)
    lasting, highest = _run(MEMORY.format(prepare=prepare, seconds=seconds)).split()
    return int(lasting) * 1024, int(highest) * 1024


def _run(script: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
