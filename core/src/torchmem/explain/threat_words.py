"""What threatens a rank, in words that the page, `torchmem why` and the alerts share.

They differ in where the numbers come from, and in nothing else.
"""

from __future__ import annotations

FRAGMENTED = (
    "Fragmentation: {stranded} is free but stranded beside live tensors, and a request above "
    "{headroom} {end}"
)
FLUSHES = "has to flush the cache"
FAILS = "fails"
LEAKS = "Memory leak: {what} grow by {pace} a step"
NEARLY_FULL = "Nearly full: no request above {headroom} succeeds, even after a flush of the cache"
NO_ROOM_FOR_LIBRARIES = (
    "The driver has {free} left for libraries such as NCCL, while PyTorch caches {releasable} in "
    "whole segments"
)
KEPT_TENSORS = "tensors kept between steps"
