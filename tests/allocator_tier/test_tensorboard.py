"""The logger for TensorBoard, with PyTorch's own writer and the file that it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.allocator
SCRIPT = """
import glob, json, os, sys, time
from torch.utils.tensorboard import SummaryWriter
from torchmem import sdk
from torchmem.integrations.tensorboard import log_memory
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

def steps():
    (path,) = glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/*.sample.json")
    return json.load(open(path))["steps"]["count"]

allocator = DeviceCachingAllocator(SimulatedGpu(1 << 30))
backend = SimulatedBackend([allocator])
sdk.instrument(backend=backend, interval=0.05)
allocator.malloc(30 << 20)
for _ in range(3): backend.step()

class Watched(SummaryWriter):
    seen = set()
    def add_scalar(self, tag, value, step, walltime):
        super().add_scalar(tag, value, step, walltime)
        self.seen.add((tag, step))

writer = Watched(sys.argv[1])
log = log_memory(writer, every=0.05)
while ("torchmem/headroom_bytes/with_flush", 3) not in writer.seen: time.sleep(0.01)
log.close()
writer.close()
log_memory(writer, every=0.05)
backend.step()
while steps() < 4: time.sleep(0.01)
time.sleep(0.3)
"""


def test_the_event_file_has_the_scalars(tmp_path: Path) -> None:
    """TensorBoard reads the scalars from the event file; a closed writer opens no other."""
    folder = tmp_path / "events"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={"PATH": "/usr/bin:/bin", "TORCHMEM_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    events = _read_events(folder)
    assert len(list(folder.iterdir())) == 1
    newest = events.Scalars("torchmem/allocated_peak_bytes")[-1]
    assert (newest.value, newest.step) == (30 << 20, 3)
    assert {"torchmem/headroom_bytes/with_flush", "torchmem/ooms_total"} <= set(
        events.Tags()["scalars"]
    )


def _read_events(folder: Path) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events
