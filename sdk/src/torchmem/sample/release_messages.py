"""Messages of `torchmem release`, and of processes of one user that share a GPU.

A request is a file next to the sample of the process that is asked. The answer says what came back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from torchmem.sample.process_messages import decode_object, decode_reason
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
    `reason` is one sentence that says why the request was refused.
    """

    request_ns: int
    state: AnswerState
    released: dict[str, int]
    seconds: float = 0.0
    reason: str | None = None


def decode_request(data: bytes) -> ReleaseRequest:
    """Return the request; raise ValueError, with a sentence, if torchmem did not write it."""
    fields = decode_object(data)
    asker, wanted = fields.get("asker"), fields.get("hook_bytes")
    if asker not in ASKERS or type(wanted) is not int:
        raise ValueError("the request was not written by torchmem.")
    if not 0 <= wanted <= MAX_WANTED_BYTES:
        raise ValueError(f"the request's bytes are not between 0 and {MAX_WANTED_BYTES}.")
    return ReleaseRequest(cast("ReleaseTier", asker), wanted)


def decode_answer(data: bytes) -> ReleaseAnswer:
    """Return the answer with printable text; raise ValueError if the SDK did not write it."""
    fields = decode_object(data)
    request_ns, state, seconds = (fields.get(name) for name in ("request_ns", "state", "seconds"))
    released = fields.get("released")
    if not (
        type(request_ns) is int
        and state in get_args(AnswerState)
        and isinstance(seconds, (int, float))
        and isinstance(released, dict)
        and all(type(size) is int for size in released.values())
    ):
        raise ValueError("the answer was not written by torchmem.")
    shown = {str(decode_reason(name)): size for name, size in released.items()}
    reason = decode_reason(fields.get("reason"))
    return ReleaseAnswer(request_ns, cast("AnswerState", state), shown, float(seconds), reason)
