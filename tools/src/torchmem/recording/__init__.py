"""Reading what `torch.cuda.memory._dump_snapshot` wrote: untrusted files into plain values."""

from __future__ import annotations

from torchmem.recording.reading import read

__all__ = ["read"]
