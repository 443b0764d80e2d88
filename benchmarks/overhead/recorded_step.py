"""Host memory and CPU time of recording one step, by the number of its allocations and frees.

    python -m torchmem.phantom --memory 24GiB -- python -m benchmarks.overhead.recorded_step

"Ring" is the memory that PyTorch holds while it records. "Entries" is the memory of the entries in
Python at the end of the step, until the peak is found. Needs PyTorch with a GPU or the phantom, and
Linux.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead.report import microseconds, rows_of, table

from torchmem.sdk.components.step_trace import step_peak
from torchmem.sdk.safety.cost import MAX_TRACE_ENTRIES, MIN_TRACE_ENTRIES

EVENTS = (MIN_TRACE_ENTRIES, MAX_TRACE_ENTRIES, 2 * MAX_TRACE_ENTRIES)
LIVE = 1000
MIB = 1 << 10
"""In KiB, the unit of /proc/self/status."""


def memory(field: str) -> int:
    """Return a field of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def allocate(live: list[Any], events: int) -> None:
    """Allocate and free, half of the events each."""
    import torch

    for number in range(events // 2):
        live[number % LIVE] = torch.empty(64, device="cuda")


def row(events: int) -> list[str]:
    """Return one row of the table."""
    from torchmem.sdk.pytorch.backend import TorchBackend

    backend = TorchBackend()
    live: list[Any] = [None] * LIVE
    allocate(live, 4 * LIVE)
    before = memory("VmRSS")
    assert backend.start_trace(events)
    allocate(live, events - 2)
    recording = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    started = time.thread_time()
    kept = backend.end_trace(lambda traces: (len(traces[0]), step_peak(traces[0], 0, {}, {})))
    spent = time.thread_time() - started
    assert kept is not None
    assert kept[0] == events - 2
    ring, entries = recording - before, memory("VmHWM") - recording
    return [f"{events:,}", f"{ring / MIB:.0f} MiB", f"{entries / MIB:.0f} MiB", microseconds(spent)]


def main(*arguments: str) -> None:
    """Print a table; each row comes from a process of its own."""
    if arguments[:1] == ("row",):
        print("\t".join(row(int(arguments[1]))))
        return
    rows = rows_of("benchmarks.overhead.recorded_step", arguments or map(str, EVENTS))
    print(table(("events", "ring", "entries", "at the end"), rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
