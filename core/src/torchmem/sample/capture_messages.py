"""Messages between `torchmem capture` and a training process, as files in the run directory.

The command writes a request next to the process's sample file. The process writes its answer and
the memory snapshot there too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torchmem.sample.process_messages import decode, readable

REQUEST_SUFFIX = ".capture-request.json"
ANSWER_SUFFIX = ".capture-answer.json"
SNAPSHOT_SUFFIX = ".snapshot.pickle"
OOM_SNAPSHOT_SUFFIX = ".oom.snapshot.pickle"
OOM_RECORDING_SUFFIX = ".oom.recording.pickle"
"""A snapshot at an OutOfMemoryError with the trace of allocations that led to it."""
CAPTURE_SUFFIXES = (REQUEST_SUFFIX, ANSWER_SUFFIX, SNAPSHOT_SUFFIX)
"""Files that a capture may leave in the run directory; SNAPSHOT_SUFFIX matches both snapshots."""

FACTS_KEY = "torchmem"
"""Key in a captured snapshot for what PyTorch leaves out of it; see docs/recordings.md."""

MAX_SECONDS = 300.0
DEFAULT_ENTRIES = 100_000
"""Newest entries that are kept for each device: about 100 bytes each in the file, and a few KB of
stack each in memory while recording. An allocation takes three."""
MAX_CAPTURE_ENTRIES = 2_000_000
MAX_SNAPSHOT_BYTES = 256 << 20

# How long the process waits for a step, to start recording and then to stop it.
START_GRACE_SECONDS = 120.0
STOP_GRACE_SECONDS = 30.0

AnswerState = Literal["waiting", "recording", "done", "refused"]


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A request to record memory history for `seconds`, and keep the newest entries."""

    seconds: float
    max_entries: int = DEFAULT_ENTRIES


@dataclass(frozen=True, slots=True)
class CaptureAnswer:
    """The progress of a request.

    `request_ns` is the modification time of the request file; `reason` is one sentence that says
    why the request was refused. `overwritten` says that older entries were lost, and
    `kept_seconds` what the others span, which is unknown before PyTorch 2.3.
    """

    request_ns: int
    state: AnswerState
    reason: str | None = None
    overwritten: bool = False
    kept_seconds: float | None = None


def decode_request(data: bytes) -> CaptureRequest:
    """Return the request; raise ValueError, with a sentence, if the command did not write it."""
    request = decode(data, CaptureRequest)
    if not 0 < request.seconds <= MAX_SECONDS:
        raise ValueError(f"the request's seconds are not between 0 and {MAX_SECONDS:g}.")
    if not 0 < request.max_entries <= MAX_CAPTURE_ENTRIES:
        raise ValueError(f"the request's entries are not between 1 and {MAX_CAPTURE_ENTRIES:,}.")
    return request


def decode_answer(data: bytes) -> CaptureAnswer:
    """Return the answer with printable text; raise ValueError if the SDK did not write it."""
    answer = decode(data, CaptureAnswer)
    return replace(answer, reason=answer.reason and readable(answer.reason))
