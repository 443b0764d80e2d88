"""Measure the cost of `torchmem why` on a large memory snapshot. Run it twice: create, then read:

    python -m benchmarks.snapshot_reading big.pickle --events 2500000     # 500 MB
    python -m benchmarks.snapshot_reading big.pickle

The snapshot has the shape of `torch.cuda.memory._dump_snapshot` with stacks: `--frames` frames per
event, each frame one dict that all stacks share, and `--stacks` different stacks, as a loop has.
Seconds are CPU time of the command and its children; memory is the peak of what they have resident
together.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

FRAMES = 3000
BASE = 0x7F00_0000_0000


def write(path: Path, events: int, stack_frames: int, stacks: int) -> None:
    """Write a snapshot of one device with `events` events."""
    gc.disable()
    rng = random.Random(0)  # noqa: S311 - test data
    frames = [
        {"name": f"f{n}", "filename": f"/site-packages/module_{n % 50}.py", "line": n}
        for n in range(FRAMES)
    ]
    known = [rng.choices(frames, k=stack_frames) for _ in range(stacks)]
    trace: list[dict[str, Any]] = []
    for _ in range(events // 3):
        address, size = BASE + 512 * rng.randrange(1 << 24), rng.randrange(1, 1 << 24)
        for action in ("alloc", "free_requested", "free_completed"):
            entry: dict[str, Any] = {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": 10**15 + 7 * len(trace),
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
            }
            if stack_frames:
                entry["frames"] = [*rng.choice(known)]
            trace.append(entry)
    block = {
        "address": BASE,
        "size": 1 << 34,
        "requested_size": 1,
        "state": "inactive",
        "frames": [],
    }
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 1 << 34,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }
    snapshot = {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}
    with path.open("wb") as file:
        pickle.dump(snapshot, file)


def resident(pid: int) -> int:
    """Return the resident memory of a process and its descendants in bytes."""
    found = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found = int(line.split()[1]) << 10
        found += sum(map(resident, _children(pid)))
    return found


def _children(pid: int) -> Iterator[int]:
    yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def main() -> None:
    """Create the snapshot if it is missing, otherwise explain it and print the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the snapshot; created if it is missing")
    add("--events", type=int, default=300_000, metavar="N", help="events (default: 300000)")
    add("--frames", type=int, default=30, metavar="N", help="frames of a stack (default: 30)")
    add("--stacks", type=int, default=2000, metavar="N", help="stacks (default: 2000)")
    arguments = parser.parse_args()
    path: Path = arguments.file
    if not path.exists():
        write(path, arguments.events, arguments.frames, arguments.stacks)
        print(f"{path} created; run this again to read it")
        return
    command = [sys.executable, "-m", "torchmem.cli", "why", str(path)]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = path.stat().st_size
    print(f"{size / 1e6:.0f} MB: {used.ru_utime + used.ru_stime:.1f} s of CPU time")
    print(f"peak resident memory: {peak / 1e6:.0f} MB, {peak / size:.1f} times the file")


if __name__ == "__main__":
    main()
