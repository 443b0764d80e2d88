"""Where requests for a capture arrive: a file beside the process's sample, trusted by its owner alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchmem.core.capture import (
    ANSWER_SUFFIX,
    MAX_MESSAGE_BYTES,
    REQUEST_SUFFIX,
    AnswerState,
    CaptureAnswer,
    CaptureRequest,
    beside,
    decode_request,
    encode,
)
from torchmem.core.files import UntrustedFileError, read_untrusted
from torchmem.sdk._publish import replace_file

# Older than this, nobody waits for it any more: the command that wrote it was killed.
STALE_SECONDS = 120.0

_Version = tuple[int, int, int, int]


class RefusedError(Exception):
    """A request that is not granted; the text is the reason, one sentence."""


class RequestFile:
    """The request file and the answer to it; an unchanged file costs one stat."""

    def __init__(self, sample: Path) -> None:
        self._path = beside(sample, REQUEST_SUFFIX)
        self._answer_path = beside(sample, ANSWER_SUFFIX)
        self._version: _Version | None = None
        self._request_ns = 0

    def changed(self) -> bool:
        """Whether the file is another one than at the last call, or has gone."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            version = None
        else:
            version = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_uid)
            self._request_ns = status.st_mtime_ns
        changed, self._version = version != self._version, version
        return changed

    def read(self) -> CaptureRequest | None:
        """The request, None when there is none; raises RefusedError."""
        try:
            data, status = read_untrusted(self._path, MAX_MESSAGE_BYTES)
            _check_owner(status.st_uid)
            if time.time() - status.st_mtime > STALE_SECONDS:
                raise RefusedError("the request is older than two minutes.")
            return decode_request(data)
        except FileNotFoundError:
            return None
        except UntrustedFileError as error:
            raise RefusedError(f"the request {error}.") from error
        except ValueError as error:
            raise RefusedError(str(error)) from error

    def answer(self, state: AnswerState, reason: str | None = None) -> None:
        """Tell the command how far its request is; raises OSError."""
        replace_file(self._answer_path, encode(CaptureAnswer(self._request_ns, state, reason)))


def _check_owner(uid: int) -> None:
    own = os.geteuid()
    if uid not in {0, own}:
        raise RefusedError(f"the request is user {uid}'s; only the process's own user ({own}) and root may ask.")
