"""The result of replaying a recording under other settings, as values and as JSON.

All sizes are bytes. docs/recordings.md describes the JSON, whose keys are the names of the fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from torchmem.sample.sample import OomCause, OomDetail
from torchmem.simulator.blocks import BlockOrder

SCHEMA = 1

Start = Literal["recorded", "empty", "packed", "switched"]
"""What a replay started from.

"recorded" and "switched": the memory that was recorded; "switched" under other settings from there
on. "empty": nothing. "packed": live blocks that were requested in the order of their addresses from
an empty allocator. Where they would lie after a restart is unknown; this is the most favorable
guess.
"""
Direction = Literal["less", "same", "more"]
"""Peak reserved memory, compared with the recorded settings."""
GpuSource = Literal["oom", "given", "capture"]
"""How the memory of the GPU is known: an OOM in the trace, the caller, or `torchmem capture`."""
Decision = Literal["change", "keep", "none"]
"""Change the settings, keep them, or no recommendation: the replay does not match the recording."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How well the replay under the recorded settings reproduces the recording.

    Of all `allocations`, `landed` got their recorded address; `first_miss` is the event number of
    the first one that did not. `block_order` is the order of free blocks of equal size that matches
    the recording, None if several do.
    `recorded_peak_reserved` is counted from the recorded segments, `replayed_peak_reserved` comes
    from the replay. `reason` is why no recommendation follows, or None.
    """

    allocations: int
    landed: int
    first_miss: int | None
    block_order: BlockOrder | None
    recorded_peak_reserved: int
    replayed_peak_reserved: int
    reason: str | None = None

    @property
    def share(self) -> float:
        """The share of allocations on their recorded address, 0 to 1; 1 without allocations."""
        return self.landed / self.allocations if self.allocations else 1.0

    @property
    def trusted(self) -> bool:
        """Whether the replay is faithful enough for a recommendation."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """The first request that failed, and the state of the memory after it.

    `event` is its number in the trace; `requested` is rounded up to a block. `cause` and `detail`
    are those of `torchmem why`, or None if unknown.
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
    """One point of a timeline, at the event with this number.

    All are the peaks since the previous point. `stranded` are the free bytes of the default pools
    that cannot go back to the driver.
    """

    event: int
    reserved: int
    allocated: int
    stranded: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The replay under one setting; of a refused one, only `name`, `conf` and `refused` are set.

    Attributes:
        name: for people, unique within a result ("recorded", "default", "expandable segments" ...).
        conf: the text for PYTORCH_CUDA_ALLOC_CONF, "" for the defaults.
        refused: why the setting was not replayed, in one sentence.
        peak_allocated: the peak of blocks in use.
        worst_stranded: the peak of stranded memory, first reached at `worst_event`.
        retries: how often all cached memory was released to serve a request, including OOMs.
        ooms: requests that failed; `oom` is the first.
        replayed_events: events before the end of the replay: all of them, unless a request failed
            that succeeded in the recording.
        device_allocs: driver calls that allocate memory: cudaMalloc and mappings.
        device_frees: driver calls that free memory, each of which waits for the GPU: cudaFree and
            unmappings.
        syncs: how often the allocator waited for all streams.

    All counts start at the beginning of the trace and exclude what `start` needed.
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
        """Bytes for PyTorch on which this setting needs no retry; None if it retried or failed."""
        return None if self.refused or self.retries or self.ooms else self.peak_reserved


@dataclass(frozen=True, slots=True)
class Restart:
    """What is known about a restart under a setting, if the trace does not start with the program.

    Either `peak_reserved`, an estimate to compare with the recorded peak, or only its `direction`.
    """

    name: str
    conf: str
    peak_reserved: int | None = None
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do.

    `recommended` is the name of the replay to switch to and `line` the shell command for it; both
    are None unless the decision is "change". `sentence` is the recommendation in one sentence,
    `reasons` are the numbers that support it.
    """

    decision: Decision
    sentence: str
    recommended: str | None = None
    line: str | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer for one device of one snapshot.

    `gpu_bytes` is what PyTorch can reserve at most, without the CUDA context and other processes;
    if it is None, no setting can run out of memory. `events` is the length of the trace. `outcomes`
    starts with the recording itself (`start` "recorded"). If it ran on a larger GPU, the recorded
    settings on this GPU follow ("recorded, this GPU"). The other outcomes are compared with the
    last of these. If the trace does not begin with the program, they start from the recorded memory
    (`start` "switched"), and `restarts` has what is known about a restart. `caveats` are sentences
    about the whole answer, the most serious first.
    """

    name: str
    device: int
    events: int
    gpu_bytes: int | None
    gpu_source: GpuSource | None
    fidelity: Fidelity
    outcomes: tuple[ReplayResult, ...]
    verdict: Recommendation
    caveats: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()


def document(result: WhatIf) -> str:
    """Return the answer as one line of JSON."""
    return json.dumps({"schema": SCHEMA} | whatif_values(result), ensure_ascii=True) + "\n"


def whatif_values(result: WhatIf) -> dict[str, Any]:
    """Return the fields of the answer and the values that follow from them, ready for JSON.

    A timeline becomes one list for each of its columns.
    """
    values: dict[str, Any] = asdict(result)
    values["fidelity"] |= {"share": result.fidelity.share, "trusted": result.fidelity.trusted}
    values["outcomes"] = [_replay_values(replay) for replay in result.outcomes]
    return values


def _replay_values(replay: ReplayResult) -> dict[str, Any]:
    if replay.refused is not None:
        return {"name": replay.name, "conf": replay.conf, "refused": replay.refused}
    columns = {
        column.name: [getattr(point, column.name) for point in replay.timeline]
        for column in fields(TimelinePoint)
    }
    return asdict(replay) | {"sufficient": replay.sufficient, "timeline": columns}
