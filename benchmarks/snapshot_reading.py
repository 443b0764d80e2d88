"""Measure the cost of reading a large memory snapshot. Run it twice: create a file, then read it:

    python -m benchmarks.snapshot_reading big.pickle --events 2500000     # 500 MB

The snapshot has the shape of `torch.cuda.memory._dump_snapshot` with stacks: 30 frames per event,
each frame one dict that all stacks share. Seconds are wall time; memory is the peak of resident
memory.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import resource
import time
from pathlib import Path
from typing import Any

from torchmem.trace import read

STACK_FRAMES, FRAMES = 30, 3000
BASE = 0x7F00_0000_0000


def write(path: Path, events: int) -> None:
    """Write a snapshot of one device with `events` events."""
    gc.disable()
    rng = random.Random(0)  # noqa: S311 - test data
    frames = [
        {"name": f"f{n}", "filename": f"/site-packages/module_{n % 50}.py", "line": n}
        for n in range(FRAMES)
    ]
    trace: list[dict[str, Any]] = []
    for _ in range(events // 3):
        address, size = BASE + 512 * rng.randrange(1 << 24), rng.randrange(1, 1 << 24)
        for action in ("alloc", "free_requested", "free_completed"):
            entry = {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": 10**15 + 7 * len(trace),
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
                "frames": rng.choices(frames, k=STACK_FRAMES),
            }
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


def main() -> None:
    """Create the snapshot if it is missing, otherwise read it and print the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the snapshot; created if it is missing"
    )
    parser.add_argument(
        "--events",
        type=int,
        default=300_000,
        metavar="N",
        help="events to create (default: 300000)",
    )
    arguments = parser.parse_args()
    path: Path = arguments.file
    if not path.exists():
        write(path, arguments.events)
        print(f"{path} created; run this again to read it")
        return
    began = time.perf_counter()
    (recording,) = read(path)
    seconds = time.perf_counter() - began
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"{path.stat().st_size / 1e6:.0f} MB, {len(recording.events):,} events: {seconds:.1f} s")
    print(f"peak resident memory: {own} MiB in this process, {worker} MiB in the worker")


if __name__ == "__main__":
    main()
