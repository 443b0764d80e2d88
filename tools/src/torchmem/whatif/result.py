"""What replaying a recording under other settings says: plain values, nothing to compute. All sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmem.sample.sample import OomCause, OomDetail

Start = Literal["recorded", "empty", "packed"]
"""What a replay began with: the memory as it was when the trace began, nothing at all, or what was alive then, packed.

Packed: the live blocks of that moment were requested one after the other, in the order of their addresses, from an
empty allocator. Nobody can know where they would lie under other settings; this is the kindest guess.
"""
CardSource = Literal["oom", "given"]
"""How the memory of the card is known: from an OOM in the trace, or from the caller."""
Decision = Literal["change", "keep", "none"]
"""Set the recommended settings, keep the recorded ones, or no verdict: the replay does not repeat the recording."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How well the replay under the recorded settings repeats the recording.

    `landed`: of `allocations`, those that got the recorded address. `first_miss`: number of the event of the first
    that did not. `oldest_segment_first`: the rule for free blocks of equal size that fits: True that of PyTorch 2.13,
    False that up to 2.11, None when both fit. `recorded_peak_reserved` is counted from the recording's own segments,
    `replayed_peak_reserved` comes from the replay. `reason`: why no verdict follows, None when one does.
    """

    allocations: int
    landed: int
    first_miss: int | None
    oldest_segment_first: bool | None
    recorded_peak_reserved: int
    replayed_peak_reserved: int
    reason: str | None = None

    @property
    def share(self) -> float:
        """Share of the allocations that landed on the recorded address, 0 to 1; 1 without any allocation."""
        return self.landed / self.allocations if self.allocations else 1.0

    @property
    def trusted(self) -> bool:
        """Whether the replay repeats the recording well enough for a verdict."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The first request that failed: number of its event in the trace, its size, and how the memory stood after it.

    `requested`: rounded to a block. `cause` and `detail` as in `torchmem oom`; None when unknown.
    """

    event: int
    requested: int
    reserved: int
    allocated: int
    stranded: int
    cause: OomCause | None = None
    detail: OomDetail | None = None


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One point of the timeline, at the event with this number.

    `reserved` and `allocated`: the most since the moment before. `stranded`: free bytes of the default pools that
    could not go back to the driver, at this moment.
    """

    event: int
    reserved: int
    allocated: int
    stranded: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one setting would have done. Of a refused one only `name`, `conf` and `refused` mean anything.

    `name`: for people, unique within a result ("recorded", "default", "expandable segments" ...). `conf`: the text for
    PYTORCH_CUDA_ALLOC_CONF, "" for the defaults. `refused`: one sentence why it was not replayed.

    `peak_allocated` counts blocks in use. `worst_stranded` is the most of all moments in `timeline`, `worst_event` the
    event where it was. `retries`: times that all cached memory was given back to serve a request, OOMs included.
    `ooms`: requests that failed; `oom` is the first. `replayed_events`: events before the replay ended, all of them
    unless a request failed that succeeds in the recording. `device_allocs`, `device_frees`: calls to the driver
    (cudaMalloc and mappings; cudaFree and unmappings, each of which waits for the GPU). `syncs`: times that all
    streams were waited for. All these count from the beginning of the trace, not what `start` needed.
    """

    name: str
    conf: str
    refused: str | None = None
    start: Start = "recorded"
    peak_reserved: int = 0
    peak_allocated: int = 0
    worst_stranded: int = 0
    worst_event: int | None = None
    retries: int = 0
    ooms: int = 0
    oom: FailedRequest | None = None
    replayed_events: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    syncs: int = 0
    timeline: tuple[TimelinePoint, ...] = ()

    @property
    def sufficient(self) -> int | None:
        """Bytes for PyTorch on which this setting needs no retry: its peak; None if it needed one, or was refused."""
        return None if self.refused or self.retries or self.ooms else self.peak_reserved


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do. `recommended`: name of the outcome to switch to; `line`: what to type for it. Both None otherwise.

    `sentence`: the verdict in one sentence; `reasons`: what speaks for it, with numbers.
    """

    decision: Decision
    sentence: str
    recommended: str | None = None
    line: str | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer for one device of one snapshot.

    `card_bytes`: what PyTorch could reserve at most, without the CUDA context and what others hold; None when unknown,
    and then no setting can run out of memory. `events`: number of events in the trace. `outcomes`: the recording
    itself first (`start` "recorded"); if that did not begin empty, then the recorded settings from the same packed
    start as all the others ("recorded, packed"), and if it ran on a larger card, on this one ("recorded, this card");
    the others are judged against that. `caveats`: sentences that hold for the whole answer, the gravest first.
    """

    name: str
    device: int
    events: int
    card_bytes: int | None
    card_source: CardSource | None
    fidelity: Fidelity
    outcomes: tuple[ReplayResult, ...]
    verdict: Recommendation
    caveats: tuple[str, ...] = ()
