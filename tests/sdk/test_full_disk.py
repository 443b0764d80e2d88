"""The files of a process after another user has filled the run directory's file system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.users import may_mount

pytestmark = pytest.mark.skipif(not may_mount(), reason="mounting a file system needs root")

SCRIPT = """
import contextlib, errno, itertools, json, os, subprocess, sys, time
from pathlib import Path
from torchmem import sdk
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.errors import OutOfMemoryError
from support.users import as_user
from support.waiting import until

run_dir = Path(sys.argv[1])
options = "mode=3777,size=2m,nr_inodes=400"
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "torchmem", str(run_dir)], check=True)
GPU = SimulatedGpu(1 << 30, context_bytes=0, uuid="GPU-1")
allocator = DeviceCachingAllocator(GPU)
backend = SimulatedBackend([allocator])
session = sdk.instrument(backend=backend, run_dir=run_dir, interval=0.01)
allocator.malloc(1 << 20)
backend.step()
until(lambda: len(list(run_dir.glob("*/.*.reserve"))) == 2)

def fill():
    numbers = itertools.count(time.monotonic_ns())
    try:
        while sys.argv[2] == "inodes":
            (run_dir / f"junk{next(numbers)}").touch()
        with open(run_dir / f"junk{next(numbers)}", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error

as_user(61002, fill)
for _ in range(3):
    with contextlib.suppress(OutOfMemoryError):
        allocator.malloc(2 << 30)
    as_user(61002, fill)
own = run_dir / str(os.geteuid())
during = json.loads(next(own.glob("*.sample.json")).read_bytes())
session.close()
after = json.loads(next(own.glob("*.sample.json")).read_bytes())
print(json.dumps({
    "ooms": [sample["devices"][0]["counters"]["ooms"]["capacity"] for sample in (during, after)],
    "ended": after["ended"],
    "reports": [json.loads(path.read_bytes())["oom"]["cause"] for path in own.glob("*.oom.json")],
    "left": [path.name for path in own.glob(".*")],
}))
"""


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_full_file_system_does_not_cost_the_evidence(
    root: Path, shared_dir: Path, what: str
) -> None:
    """Whoever takes the last byte or inode, the OOMs, the end and a report reach the disk."""
    command = ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(shared_dir), what]
    environment = {"PYTHONPATH": str(root / "tests")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=60
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ooms"] == [3, 3], done.stderr
    assert result["ended"] == "exited"
    assert result["reports"]
    assert result["left"] == []
