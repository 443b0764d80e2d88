"""The state of a process from evidence: what it wrote last, and whether it still runs."""

from __future__ import annotations

from torchmem.sample.processes import Sighting
from torchmem.sample.sample import Sample, State, live_state

UNSEEN_FRESH_SECONDS = 60.0


def state(sample: Sample, sighting: Sighting, now: float, age_seconds: float) -> State:
    """What the process is doing, or how it ended.

    Its own last word counts first. Without one, a process that lives is running or stalled, and so is a hidden one
    that wrote less than a minute ago; any other ended in an OutOfMemoryError if one was pending, else it was killed.
    `now` in Unix seconds, `age_seconds` since it wrote.
    """
    if sample.ended is not None:
        return sample.ended
    if sighting.alive or (sighting.alive is None and age_seconds < UNSEEN_FRESH_SECONDS):
        return live_state(sample, now)
    return "oom" if sample.oom_pending else "killed"
