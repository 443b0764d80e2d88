"""What the tensors of a GPU were at an OutOfMemoryError, as text."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import format_size
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.oom_report import OomReport

MIN_SHARE = 0.005
"""Smaller groups are left out."""
NOT_IN_PYTHON = "(not found in Python: kept by autograd for a backward pass, or by libraries)"


def tensor_lines(report: OomReport) -> Iterator[str]:
    """Yield the lines of the section; none if the tensors are unknown."""
    if not report.tensors:
        return
    yield "What the tensors are"
    allocator = report.device.allocator
    known = sum(group.bytes for group in report.tensors)
    total = max(known, allocator.allocated_bytes.total if allocator else 0)
    for group in report.tensors:
        if group.bytes >= MIN_SHARE * total:
            yield f"  {format_size(group.bytes):>12}  {_kind(group)}"
    if total - known >= MIN_SHARE * total:
        yield f"  {format_size(total - known):>12}  {NOT_IN_PYTHON}"


def _kind(group: TensorGroup) -> str:
    """Return a group as "216 × [8, 128, 8000] float32"."""
    if group.shape is None or group.dtype is None:
        return f"{group.count:,} × other shapes"
    return f"{group.count:,} × [{', '.join(map(str, group.shape))}] {group.dtype}"
