"""Messages of `torchmem release`, and of processes of one user that share a GPU.

A request is a file next to the sample of the process that is asked. The answer says what came back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torchmem.sample.process_messages import decode, readable
from torchmem.sample.release_tiers import TIERS, ReleaseTier

REQUEST_SUFFIX = ".release-request.json"
ANSWER_SUFFIX = ".release-answer.json"
RELEASE_SUFFIXES = (REQUEST_SUFFIX, ANSWER_SUFFIX)
"""Files that requests may leave in the run directory."""

MAX_WANTED_BYTES = 1 << 50

ASKERS = [tier.name for tier in TIERS.values() if tier.can_be_asked]
AnswerState = Literal["waiting", "done", "refused"]


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """A request to return memory to the driver.

    `asker` says who asks: `request` is a command, `neighbors` a process on the same GPU.
    `hook_bytes` are what pressure hooks are asked to free besides the cache; 0 calls none.
    """

    asker: ReleaseTier
    hook_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseAnswer:
    """The progress of a request.

    `request_ns` is the modification time of the request file. `released` are the bytes that were
    returned to the driver, by the device's UUID or torch's index. `seconds` is the time it took.
    `reason` is one sentence that says why the request was refused, and `note` one on what the
    process holds besides and how to free it.
    """

    request_ns: int
    state: AnswerState
    released: dict[str, int]
    seconds: float = 0.0
    reason: str | None = None
    note: str | None = None


def decode_request(data: bytes) -> ReleaseRequest:
    """Return the request; raise ValueError, with a sentence, if torchmem did not write it."""
    request = decode(data, ReleaseRequest)
    if request.asker not in ASKERS:
        raise ValueError(f"the tier {request.asker} cannot be asked for.")
    if not 0 <= request.hook_bytes <= MAX_WANTED_BYTES:
        raise ValueError(f"the request's bytes are not between 0 and {MAX_WANTED_BYTES}.")
    return request


def decode_answer(data: bytes) -> ReleaseAnswer:
    """Return the answer with printable text; raise ValueError if the SDK did not write it."""
    answer = decode(data, ReleaseAnswer)
    released = {readable(name): size for name, size in answer.released.items()}
    return replace(
        answer,
        released=released,
        reason=answer.reason and readable(answer.reason),
        note=answer.note and readable(answer.note),
    )
