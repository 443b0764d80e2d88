"""A request that a command writes next to this process's sample, and the answer to it.

Only the process's own user and root are trusted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from torchmem.sample.process_messages import MAX_MESSAGE_BYTES, encode, sibling_path
from torchmem.sample.run_directory import replace_file
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")

# Older requests are refused: the command that wrote them was killed. So are those from the future,
# whose age is not known because the clock was set back.
STALE_SECONDS = 120.0

_Version = tuple[int, int, int, int]


def is_fresh(written: float) -> bool:
    """Return whether a request that was written at this Unix time is not too old to be served."""
    return abs(time.time() - written) <= STALE_SECONDS


class RequestFile(Generic[R]):
    """The request file and the answer to it; checking an unchanged file costs one stat."""

    def __init__(
        self, sample: Path, request: str, answer: str, decode: Callable[[bytes], R]
    ) -> None:
        """`request` and `answer` are suffixes. `decode` raises ValueError for a bad request."""
        self._path = sibling_path(sample, request)
        self._answer_path = sibling_path(sample, answer)
        self._decode = decode
        self._version: _Version | None = None
        self.request_ns = 0

    def changed(self) -> bool:
        """Return whether the file was replaced or removed since the last call."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            version = None
        else:
            version = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_uid)
            self.request_ns = status.st_mtime_ns
        changed, self._version = version != self._version, version
        return changed

    def read(self, refuse: Callable[[str], object]) -> R | None:
        """Return the request, or None without one; one that is not granted goes to `refuse`.

        That gets the reason in one sentence.
        """
        try:
            data, status = read_untrusted(self._path, MAX_MESSAGE_BYTES)
            _check(status)
            return self._decode(data)
        except FileNotFoundError:
            return None
        except UntrustedFileError as error:
            refuse(f"the request {error}.")
        except ValueError as error:
            refuse(str(error))
        return None

    def answer(self, message: DataclassInstance) -> None:
        """Write the state of the request for the command to read. Raises OSError."""
        replace_file(self._answer_path, encode(message))


def _check(status: os.stat_result) -> None:
    """Raise ValueError, with a sentence, for a request of another user, and for an old one."""
    uid, own = status.st_uid, os.geteuid()
    if uid not in {0, own}:
        raise ValueError(
            f"the request is user {uid}'s; only the process's own user ({own}) and root may ask."
        )
    if not is_fresh(status.st_mtime):
        raise ValueError("the request is older than two minutes.")
