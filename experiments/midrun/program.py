"""Run a training script; record it from one step to another, or switch its settings there.

    python program.py MODE FIRST LAST FOLDER SCRIPT [ARGUMENT…]

Mode `record` writes FOLDER/snapshot.pickle as `torchmem capture` does, between the ends of the
steps FIRST and LAST. `switch:CONF` switches allocator settings at the end of FIRST. `plain` does
neither. All write FOLDER/counts.json: what the allocator counted in between. After LAST or an
OutOfMemoryError the process ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchmem.sdk.capture.capture import write_snapshot
from torchmem.sdk.capture.recorded_history import RecordedHistory
from torchmem.sdk.pytorch.backend import TorchBackend

PEAKS = {"peak_reserved": "reserved_bytes.all.peak", "peak_allocated": "allocated_bytes.all.peak"}
SUMS = {
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
    "device_allocs": "num_device_alloc",
    "device_frees": "num_device_free",
}


class Window:
    """The part of a run between the ends of two steps."""

    def __init__(self, mode: str, first: int, last: int, folder: Path) -> None:
        self.mode, self.first, self.last, self.folder = mode, first, last, folder
        self.steps = 0
        self.lifetime_peak = 0
        self.before: dict[str, int] = {}
        self.history = RecordedHistory(TorchBackend(), lambda: {0: self.lifetime_peak})

    def on_step(self, *_: object) -> None:
        """Count a step of an optimizer."""
        self.steps += 1
        if self.steps == self.first:
            self.begin()
        elif self.steps == self.last:
            self.end()

    def begin(self) -> None:
        """Begin to count, and to record or with other settings."""
        self.lifetime_peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_stats()
        action, _, conf = self.mode.partition(":")
        if action == "switch":
            torch.cuda.memory._set_allocator_settings(conf)  # noqa: SLF001
        elif action == "record":
            self.history.start()

    def end(self) -> None:
        """Write what was counted and recorded, and end the process."""
        after = torch.cuda.memory_stats()
        counts = {name: after[key] for name, key in PEAKS.items()}
        counts |= {name: after[key] - self.before.get(key, 0) for name, key in SUMS.items()}
        counts["steps"] = self.steps
        snapshot = self.history.snapshot() if self.mode == "record" else None
        if int(os.environ.get("RANK", "0")) == 0:
            if snapshot is not None:
                write_snapshot(self.folder / "snapshot.pickle", snapshot)
            (self.folder / "counts.json").write_text(json.dumps(counts))
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    """Run the script."""
    mode, first, last, folder, script, *arguments = sys.argv[1:]
    window = Window(mode, int(first), int(last), Path(folder))
    register_optimizer_step_post_hook(window.on_step)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except torch.OutOfMemoryError:
        window.end()


if __name__ == "__main__":
    main()
