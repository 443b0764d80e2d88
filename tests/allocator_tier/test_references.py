"""PyTorch's snapshot drops references it does not own; the SDK compensates for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch
from torchmem.sdk.torch_backend import TorchBackend
torch.zeros(1, device="cuda")
backend = TorchBackend()
counts = sys.getrefcount(False), sys.getrefcount(True)
for _ in range(30_000):
    backend.memory_snapshot()
now = sys.getrefcount(False), sys.getrefcount(True)
print([after - before for before, after in zip(counts, now)])
"""


def test_many_snapshots_do_not_use_up_false(tmp_path: Path) -> None:
    """After 30,000 snapshots, 3.5 days at the default cadence, reference counts are unchanged."""
    done = run_on_phantom("-c", SCRIPT, memory="4GiB", state=tmp_path, environment={})

    assert (0, "[0, 0]\n") == (done.returncode, done.stdout), done.stderr
