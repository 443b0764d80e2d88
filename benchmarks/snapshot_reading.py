"""What reading a large memory snapshot costs. Run it twice, to make a snapshot and to read it:

    python -m benchmarks.snapshot_reading big.pickle --events 2500000     # 500 MB

The snapshot is shaped as `torch.cuda.memory._dump_snapshot` writes it with stacks: 30 frames for each event, each frame
one dict that all stacks share. Seconds are wall time, memory is what was resident at most.
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

from torchmem.recording import read

FRAMES_OF_A_STACK, FRAMES = 30, 3000
BASE = 0x7F00_0000_0000


def write(path: Path, events: int) -> None:
    """A snapshot of one device with so many events."""
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
            trace.append({
                "action": action, "addr": address, "size": size, "stream": 0, "time_us": 10**15 + 7 * len(trace),
                "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0),
                "frames": rng.choices(frames, k=FRAMES_OF_A_STACK),
            })  # fmt: skip
    block = {
        "address": BASE,
        "size": 1 << 34,
        "requested_size": 1,
        "state": "inactive",
        "frames": [],
    }
    segment = {
        "device": 0, "address": BASE, "total_size": 1 << 34, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [block],
    }  # fmt: skip
    with path.open("wb") as file:
        pickle.dump(
            {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}, file
        )


def main() -> None:
    """Make the snapshot if it is not there, else read it and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the snapshot; it is made if it is not there"
    )
    parser.add_argument(
        "--events", type=int, default=300_000, metavar="N", help="events to make (default 300000)"
    )
    arguments = parser.parse_args()
    path: Path = arguments.file
    if not path.exists():
        write(path, arguments.events)
        print(f"{path} made; run this again to read it")
        return
    began = time.perf_counter()
    (recording,) = read(path)
    seconds = time.perf_counter() - began
    own, worker = (
        resource.getrusage(who).ru_maxrss >> 10
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"{path.stat().st_size / 1e6:.0f} MB, {len(recording.events):,} events: {seconds:.1f} s")
    print(f"resident at most: {own} MiB in this process, {worker} MiB in the worker")


if __name__ == "__main__":
    main()
