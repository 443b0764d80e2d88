"""Capture on demand: what the command and the training process write to each other in the run directory.

The command puts a request beside the process's sample file, the process answers beside it, and puts the snapshot there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from torchmem.sample.run_directory import SAMPLE_SUFFIX

REQUEST_SUFFIX = ".capture-request.json"
ANSWER_SUFFIX = ".capture-answer.json"
SNAPSHOT_SUFFIX = ".snapshot.pickle"
OOM_SNAPSHOT_SUFFIX = ".oom.snapshot.pickle"
SUFFIXES = (REQUEST_SUFFIX, ANSWER_SUFFIX, SNAPSHOT_SUFFIX)
"""What a process may leave in the run directory beside its sample; both kinds of snapshot end in the last one."""

MAX_MESSAGE_BYTES = 4096
MAX_REASON = 300  # characters
MAX_SECONDS = 300.0
MAX_SNAPSHOT_BYTES = 256 << 20

# How long the process waits for a step: to begin with, and to stop once the time is over.
START_GRACE_SECONDS = 120.0
STOP_GRACE_SECONDS = 30.0

AnswerState = Literal["waiting", "recording", "done", "refused"]


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """Record memory history for that long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CaptureAnswer:
    """How far a request is. `request_ns`: modification time of the request file that this answers.

    `reason`: why it was refused, one sentence.
    """

    request_ns: int
    state: AnswerState
    reason: str | None = None


def sibling_path(sample: Path, suffix: str) -> Path:
    """The file that belongs to the same process as the sample file `sample`."""
    return sample.with_name(sample.name.removesuffix(SAMPLE_SUFFIX) + suffix)


def encode(message: CaptureRequest | CaptureAnswer) -> bytes:
    """The message as JSON."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_request(data: bytes) -> CaptureRequest:
    """The request; raises ValueError, with a sentence, for anything that the command does not write."""
    seconds = _fields(data).get("seconds")
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"the request's seconds are not between 0 and {MAX_SECONDS:g}.")
    return CaptureRequest(float(seconds))


def decode_answer(data: bytes) -> CaptureAnswer:
    """The answer, its text made harmless; raises ValueError for anything that the SDK does not write."""
    fields = _fields(data)
    request_ns, state, reason = fields.get("request_ns"), fields.get("state"), fields.get("reason")
    if not isinstance(request_ns, int) or state not in get_args(AnswerState):
        raise ValueError("the answer is not one of torchmem's.")
    shown = (
        None
        if reason is None
        else "".join(c if c.isprintable() else "?" for c in str(reason)[:MAX_REASON])
    )
    return CaptureAnswer(request_ns, cast("AnswerState", state), shown)


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError("the file is not a JSON object.")  # noqa: TRY004 - a value, not a caller's mistake
    return fields
