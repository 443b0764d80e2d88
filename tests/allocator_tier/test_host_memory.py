"""Pinned memory of PyTorch's real allocator."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.phantom import json_of_script

pytestmark = pytest.mark.allocator

SCRIPT = """
from torchmem import sdk
from torchmem.sdk.pytorch.backend import TorchBackend
torch.zeros(1, device="cuda")
kept = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
dropped = torch.empty(20 << 20, dtype=torch.uint8, pin_memory=True)
del dropped
pinned = TorchBackend().pinned_memory()
print(json.dumps([pinned.used_bytes, pinned.cached_bytes]))
"""


def test_pinned_memory_is_used_or_cached(tmp_path: Path) -> None:
    """Blocks in use and freed ones count with their size in the allocator, a power of two."""
    assert json_of_script(SCRIPT, tmp_path) == [8 << 20, 32 << 20]
