"""Reads snapshot files of `torch.cuda.memory._dump_snapshot`, which are untrusted."""

from __future__ import annotations

from torchmem.trace.reading import StackedTrace, read, read_with_stacks

__all__ = ["StackedTrace", "read", "read_with_stacks"]
