"""What `torchmem compare` compares: the figures of one run, from whatever file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchmem.compare.peak_memory import PeakMemory

Kind = Literal["run", "baseline", "find_batch", "matrix", "directory"]
"""run: one process. The other kinds have many parts, and compare only with the same kind."""
Ending = Literal["whole", "cut_off", "oom"]
"""whole: it reached its end, or the planned steps. cut_off: it was killed, failed, or still runs.
oom: it ran out of memory. The peaks of the last two are those so far."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one run on one GPU, in bytes; None is unknown.

    fits: whether the memory suffices, False also if it grows until it does not. headroom: left of
    the GPU at the peak. is_whole_peak: whether `usage` is of a run that was not cut off, such as
    one on a larger GPU.
    """

    memory: PeakMemory
    ending: Ending = "whole"
    fits: bool | None = None
    total: int | None = None
    headroom: int | None = None
    retries: int | None = None
    steps: int | None = None
    step_seconds: float | None = None
    is_whole_peak: bool = True


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two things that are compared.

    name: the file. noun: what it is. parts: the runs by label, such as "cuda:0" or "batch=8".
    facts: what should be the same on both sides, such as the version of PyTorch, by name. verdict:
    what the file itself says about the run, in sentences; "" for nothing.
    """

    name: str
    noun: str
    kind: Kind
    parts: Mapping[str, Measured]
    facts: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""
