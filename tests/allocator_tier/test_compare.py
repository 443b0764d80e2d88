"""The summary of a run, and a matrix, on PyTorch's real allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.phantom import run_on_phantom, torch_server

from torchmem.explain.run_summary import SUMMARY_SUFFIX, decode

pytestmark = pytest.mark.allocator

RUN = """
import torch
from torchmem import sdk

with sdk.instrument(run="night") as session:
    kept = torch.zeros(32 << 20, device="cuda", dtype=torch.uint8)
    for _ in range(3):
        torch.zeros(100 << 20, device="cuda", dtype=torch.uint8)
        session.step()
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
SCRIPT = """
import os, sys, torch
from torchmem import sdk

session = sdk.instrument()
size = int(sys.argv[1]) << int(os.environ["SHIFT"])
for _ in range(9):
    torch.zeros(size, device="cuda", dtype=torch.uint8)
    session.step()
"""


def test_the_summary_has_the_peaks_of_pytorch(tmp_path: Path) -> None:
    """They equal `max_memory_allocated` and `max_memory_reserved`."""
    run_dir = {"TORCHMEM_RUN_DIR": str(tmp_path / "run")}
    done = run_on_phantom("-c", RUN, memory="1GB", state=tmp_path / "state", environment=run_dir)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "run").rglob(f"*{SUMMARY_SUFFIX}")
    summary = decode(path.read_bytes())
    (device,) = summary.devices

    assert (summary.state, summary.steps) == ("exited", 3)
    peaks = device.allocated_peak_bytes, device.reserved_peak_bytes
    assert list(peaks) == [int(word) for word in done.stdout.split()]


def test_a_matrix_runs_each_combination(tmp_path: Path) -> None:
    """Each combination has its own arguments, variables and peak, and no file is left."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ("--matrix", "size=1,2000", "SHIFT=20", "gpu_model=1GB")
    words = ("preflight", "--beside-gpu", "--steps", "2", "--json", *flags)
    command = (*torch_server().python(), str(script), "{size}")
    done = subprocess.run(
        [sys.executable, "-m", "torchmem.cli", *words, "--", *command],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    fits, fails = json.loads(done.stdout)["cells"]
    (device,) = fits["outcome"]["devices"]

    assert (done.returncode, fits["fits"], fails["fits"]) == (1, True, False)
    assert (device["peak_allocated"], fits["outcome"]["steps"]) == (1 << 20, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
