"""Run a training script unchanged and pause it at chosen steps to compare its numbers.

    python checkpoint.py FOLDER EVERY SCRIPT [ARGUMENT…]

After every EVERY-th optimizer step it writes PyTorch's own numbers to FOLDER/truth-STEP.json and
waits until FOLDER/go-STEP exists. The test creates that file.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Truth = dict[str, Any]


def count(segments: list[dict[str, Any]]) -> Truth:
    """Count the free memory of a snapshot in a simple way."""
    blocks = [(segment, block) for segment in segments for block in segment["blocks"]]
    free = [
        (b["size"], b["size"] == s["total_size"]) for s, b in blocks if b["state"] == "inactive"
    ]
    return {
        "segments": Counter(s["segment_type"] for s in segments),
        "blocks": Counter(f"{s['segment_type']} {b['state']}" for s, b in blocks),
        "free": sum(size for size, _ in free),
        "largest": max((size for size, _ in free), default=0),
        "whole": sum(size for size, whole in free if whole),
        "expandable": any(s["is_expandable"] for s in segments),
    }


def truth() -> Truth:
    """Return PyTorch's own numbers now."""
    free, total = torch.cuda.mem_get_info()
    return {
        "time": time.time(),
        "stats": torch.cuda.memory_stats(),
        "snapshot": count(torch.cuda.memory_snapshot()),
        "driver_free": free,
        "driver_total": total,
    }


def hold(folder: Path, step: int) -> None:
    """Write the truth and wait until the test lets training continue."""
    partial = folder / "truth.partial"
    partial.write_text(json.dumps(truth()))
    partial.rename(folder / f"truth-{step}.json")
    deadline = time.monotonic() + 600
    while not (folder / f"go-{step}").exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} was not compared within 600 s")
        time.sleep(0.02)


def main() -> None:
    """Add the hook after all others, then run the script as a main program."""
    folder, every, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    steps = itertools.count(1)

    def after_step(*_: object) -> None:
        step = next(steps)
        if step % every == 0:
            hold(folder, step)

    def before_first_step(*_: object) -> None:
        # By now the script has instrumented itself, so this hook runs after the SDK's.
        if not registered:
            registered.append(register_optimizer_step_post_hook(after_step))

    registered: list[object] = []
    register_optimizer_step_pre_hook(before_first_step)
    sys.argv = sys.argv[3:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
