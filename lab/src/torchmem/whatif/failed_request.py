"""Why a replayed request failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.oom_cause import OomEvidence, largest_free_blocks
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.explain.verdict import Circumstances, judge
from torchmem.whatif.result import FailedRequest


@dataclass(frozen=True, slots=True)
class Refusal:
    """The state in which a request failed; all sizes in bytes.

    `requested` is what was missing: a whole segment, or what `throw_on_cudamalloc_oom` refused.
    `allowed` is the allocator's own limit, and `obtainable` what it can get at most; None if there
    is no such limit.
    """

    device: int
    requested: int
    free: int
    allowed: int | None
    obtainable: int | None
    reserved: int
    allocated: int
    large_segment_size: int


def failed_request(
    number: int, size: int, stream: int, refusal: Refusal, segments: Sequence[SegmentInfo]
) -> FailedRequest:
    """Return the request of event `number` with its cause."""
    device, reserved = refusal.device, refusal.reserved
    layout = measure(segments, device, 0.0)
    evidence = OomEvidence(
        requested=refusal.requested,
        limit=refusal.allowed or refusal.obtainable or reserved + refusal.free,
        driver_free=refusal.free,
        cached_free=layout.releasable_bytes + layout.stranded_bytes,
        reserved=reserved,
        total=reserved + refusal.free,
        private_free=layout.private_free_bytes,
        large_segment=refusal.large_segment_size,
    )
    free = largest_free_blocks(segments, device, refusal.requested, stream)
    verdict = judge(evidence, free, Circumstances(is_training=False))
    return FailedRequest(
        number,
        size,
        reserved,
        refusal.allocated,
        layout.stranded_bytes,
        verdict.cause,
        verdict.detail,
    )
