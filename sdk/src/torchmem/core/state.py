"""Whether a living process still trains."""

from __future__ import annotations

from typing import Literal

from torchmem.core.sample import Sample


def living_state(sample: Sample, now: float) -> Literal["running", "stalled"]:
    """`stalled` when no step came for longer than the process itself said, after it had been stepping.

    `now` in Unix seconds. It is judged by the time of the last step, so a process that hangs with the GIL held, and
    therefore publishes nothing more, is found too.
    """
    last, patience = sample.steps.last_timestamp, sample.stall_after_seconds
    silent = last is not None and patience is not None and now - last > patience
    return "stalled" if silent else "running"
