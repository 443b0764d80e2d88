"""PyTorch's private functions drop references they do not own; the SDK compensates for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

from torchmem.sdk.pytorch.private_calls import PRIVATE_CALLS

pytestmark = pytest.mark.allocator

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch
from torchmem.sdk.pytorch.backend import TorchBackend
torch.zeros(1, device="cuda")
backend = TorchBackend()
backend.memory_snapshot()
assert backend.start_trace(100)
backend.end_trace(len)
counts = sys.getrefcount(False), sys.getrefcount(True)
for number in range(30_000):
    backend.memory_snapshot()
    if number % 100 == 0:
        assert backend.start_trace(100)
        assert backend.end_trace(len) == 1
now = sys.getrefcount(False), sys.getrefcount(True)
print([after - before for before, after in zip(counts, now)])
"""


def test_many_snapshots_do_not_use_up_false(tmp_path: Path) -> None:
    """After 30,000 snapshots, 3.5 days at the default cadence, reference counts are unchanged.

    So they are after 300 recorded steps, which is five hours.
    """
    done = run_on_phantom("-c", SCRIPT, memory="4GiB", state=tmp_path, environment={})

    assert (done.returncode, done.stdout) == (0, "[0, 0]\n"), done.stderr


def test_no_private_call_loses_a_reference(tmp_path: Path) -> None:
    """After 1,000 calls as the SDK makes them, None, True, False and arguments have as many."""
    script = Path(__file__).with_name("private_calls.py")
    done = run_on_phantom(script, memory="4GiB", state=tmp_path, environment={})
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])

    assert {private.name for private in PRIVATE_CALLS} == set(results)
    assert {name: lost for name, lost in results.items() if lost} == {}
