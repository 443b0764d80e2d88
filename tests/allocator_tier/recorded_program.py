"""Record a random program on PyTorch's allocator, or run it again under other settings.

PYTORCH_CUDA_ALLOC_CONF=CONF python -m torchmem.phantom --memory BYTES -- COMMAND, with the COMMAND

    python recorded_program.py record FOLDER SEED LENGTH [streams] [events] [pools] [ooms]
    python recorded_program.py again FOLDER

`record` writes the snapshot and the program. Both print the statistics as JSON. `again` ends where
a request fails that succeeded when it was recorded.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.allocator_programs import PlainPools, Setting
from support.real_allocator import Real

LEFT_OUT = {"reset_peak", "reset_accumulated", "drop_pool"}


def counts(real: Real) -> dict[str, int]:
    """Return the predicted statistics."""
    stats = real.stats()
    return {
        "peak_reserved": stats["reserved_bytes"]["all"]["peak"],
        "peak_allocated": stats["allocated_bytes"]["all"]["peak"],
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
        "device_allocs": stats["num_device_alloc"],
        "device_frees": stats["num_device_free"],
    }


def record(folder: Path, seed: str, length: int, features: set[str]) -> Real:
    """Record a program; without "ooms", it ends at its first OOM."""
    setting = Setting(streams=2 if "streams" in features else 1, pools="pools" in features)
    programmer, real = PlainPools(setting, random.Random(seed)), Real(setting)
    torch.cuda.memory._record_memory_history(context=None, max_entries=10**7)
    program: list[Any] = []
    while len(program) < length:
        emptied = program and program[-1][0] == ["empty_cache"] and programmer.live
        # Without a free in between, a release before a request would look like a retry.
        operation = ["free", programmer.live.pop()] if emptied else programmer.next()
        if operation[0] in LEFT_OUT or (
            operation[0] in {"record_stream", "hold_events"} and "events" not in features
        ):
            continue
        freed = counts(real)["device_frees"]
        outcome = real.run(operation)
        programmer.learn(operation, outcome)
        # An empty_cache that releases nothing leaves no trace.
        if operation != ["empty_cache"] or counts(real)["device_frees"] > freed:
            program.append([operation, isinstance(outcome, str)])
        if isinstance(outcome, str) and "ooms" not in features:
            break
    torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    (folder / "program.json").write_text(json.dumps([vars_of(setting), program]))
    return real


def vars_of(setting: Setting) -> dict[str, Any]:
    """Return the streams and pools of a setting."""
    return {"streams": setting.streams, "pools": setting.pools}


def again(folder: Path) -> Real:
    """Run the recorded program; requests that failed then are freed at once."""
    setting, program = json.loads((folder / "program.json").read_text())
    real = Real(replace(Setting(), **setting))
    for operation, failed in program:
        outcome = real.run(operation)
        if failed and isinstance(outcome, int):
            real.run(["free", operation[1]])
        elif isinstance(outcome, str) and not failed:
            break
    return real


def main() -> None:
    """Record a program or run it again, and print its statistics."""
    mode, folder, *rest = sys.argv[1:]
    real = (
        record(Path(folder), rest[0], int(rest[1]), set(rest[2:]))
        if mode == "record"
        else again(Path(folder))
    )
    print(json.dumps(counts(real)), flush=True)
    os._exit(0)  # PyTorch 2.13 aborts on releasing private pools of expandable segments


if __name__ == "__main__":
    main()
