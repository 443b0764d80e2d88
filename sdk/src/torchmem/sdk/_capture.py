"""Memory snapshots as files that PyTorch's memory_viz reads: pickled, private to the user, bounded in size.

Where requests for a capture arrive: a file beside the process's sample, trusted by its owner alone.

Capture on demand: record memory history from one step's end to another, and keep the snapshot.

Recording starts and ends in the training thread, between two steps. Only when no step comes any more the background
thread has it ended, by `Backend.call_soon`; the last step is then a part of one.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torchmem.allocator.backend import Backend
from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    MAX_MESSAGE_BYTES,
    MAX_SNAPSHOT_BYTES,
    OOM_SNAPSHOT_SUFFIX,
    REQUEST_SUFFIX,
    SNAPSHOT_SUFFIX,
    START_GRACE_SECONDS,
    STOP_GRACE_SECONDS,
    AnswerState,
    CaptureAnswer,
    CaptureRequest,
    decode_request,
    encode,
    sibling_path,
)
from torchmem.sample.run_directory import replace_file, temporary_path
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted
from torchmem.sdk._errors import Errors


class _Bounded:
    """A file that refuses to grow over MAX_SNAPSHOT_BYTES: the run directory may be memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_SNAPSHOT_BYTES

    def write(self, data: bytes) -> int:
        """Append `data`; raises OSError when that would be too much."""
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"the snapshot is larger than {MAX_SNAPSHOT_BYTES >> 20} MiB")
        return self._file.write(data)


def write_snapshot(path: Path, snapshot: Mapping[str, Any]) -> None:
    """Replace `path` at once, readable by this user only; raises OSError."""
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            pickle.dump(snapshot, _Bounded(file))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# Older than this, nobody waits for it any more: the command that wrote it was killed.
STALE_SECONDS = 120.0

_Version = tuple[int, int, int, int]


class RefusedError(Exception):
    """A request that is not granted; the text is the reason, one sentence."""


class RequestFile:
    """The request file and the answer to it; an unchanged file costs one stat."""

    def __init__(self, sample: Path) -> None:
        self._path = sibling_path(sample, REQUEST_SUFFIX)
        self._answer_path = sibling_path(sample, ANSWER_SUFFIX)
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
        raise RefusedError(
            f"the request is user {uid}'s; only the process's own user ({own}) and root may ask."
        )


# Newest entries kept for each device: about 100 bytes each in the file, a few KB of stack in memory while recording.
HISTORY_ENTRIES = 100_000

Move = Literal["wait", "start", "finish", "give_up"]


@dataclass(frozen=True, slots=True)
class Job:
    """One granted request; times in seconds of a monotonic clock."""

    request: CaptureRequest
    granted: float
    started: float | None = None
    is_ending: bool = False


def next_move(job: Job, now: float, *, at_step: bool) -> Move:
    """What is to be done at `now`, at the end of a step or somewhere else."""
    if job.started is None:
        if at_step:
            return "start"
        return "give_up" if now >= job.granted + START_GRACE_SECONDS else "wait"
    if job.is_ending and not at_step:
        return "wait"
    end = job.started + job.request.seconds
    return "finish" if now >= (end if at_step else end + STOP_GRACE_SECONDS) else "wait"


class Capture:
    """Serves the requests of one process, one at a time.

    `tick` belongs to the background thread, `at_step` to the training thread; neither waits for the other.
    """

    def __init__(
        self,
        backend: Backend,
        sample: Path,
        errors: Errors,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sample`: this process's sample file, which names all others."""
        self._backend = backend
        self._errors = errors
        self._sample = sample
        self._requests = RequestFile(sample)
        self._clock = clock
        self._job: Job | None = None
        self._asked_to_finish = False
        self._busy = threading.Lock()

    def tick(self) -> None:
        """Look for a new or withdrawn request, and after the one that no step serves."""
        with self._alone() as alone:
            if alone and self._requests.changed():
                self._drop()
                self._take()
            elif alone and self._job:
                self._move(self._job, at_step=False)
        if self._job and self._job.is_ending and not self._asked_to_finish:
            self._asked_to_finish = True
            self._backend.call_soon(self._errors.quiet(self._finish_late))

    def _finish_late(self) -> None:
        self._asked_to_finish = False
        with self._alone() as alone:
            if alone and self._job and self._job.is_ending:
                self._move(self._job, at_step=True)

    def at_step(self) -> None:
        """The end of a step; without a request this costs one comparison."""
        if self._job is None:
            return
        with self._alone() as alone:
            if alone and self._job:
                self._move(self._job, at_step=True)

    def close(self) -> None:
        """The process ends: what was recorded is kept."""
        with self._alone() as alone:
            if alone and self._job:
                self._finish() if self._job.started is not None else self._refuse(
                    "the process ended before a step."
                )

    def keep_oom(self) -> None:
        """Keep the state that an OutOfMemoryError left, in place of the one before."""
        with self._errors.swallow("capture"):
            snapshot = self._backend.full_snapshot(traces=False)
            if snapshot is not None:
                write_snapshot(sibling_path(self._sample, OOM_SNAPSHOT_SUFFIX), snapshot)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        mine = self._busy.acquire(blocking=False)
        try:
            with self._errors.swallow("capture"):
                yield mine
        finally:
            if mine:
                self._busy.release()

    def _take(self) -> None:
        try:
            request = self._requests.read()
        except RefusedError as refused:
            self._refuse(str(refused))
            return
        if request is not None:
            self._job = Job(request, self._clock())
            self._requests.answer("waiting")

    def _move(self, job: Job, *, at_step: bool) -> None:
        now = self._clock()
        move = next_move(job, now, at_step=at_step)
        try:
            if move == "start":
                self._start(job, now)
            elif move == "finish" and at_step:
                self._finish()
            elif move == "finish":
                self._job = replace(job, is_ending=True)
            elif move == "give_up":
                self._refuse(
                    f"no step ended within {START_GRACE_SECONDS:g} s; in a loop without an optimizer of torch.optim "
                    "call session.step()."
                )
        except Exception as error:
            self._refuse(f"it failed in the process ({type(error).__name__}: {error}).")
            raise

    def _start(self, job: Job, now: float) -> None:
        recording = self._backend.history_enabled()
        if recording is None:
            self._refuse("this allocator, or this version of PyTorch, records no memory history.")
        elif recording:
            self._refuse(
                "the script records memory history itself, and its recording is left alone."
            )
        else:
            self._backend.start_history(HISTORY_ENTRIES)
            self._job = replace(job, started=now)
            self._requests.answer("recording")

    def _finish(self) -> None:
        if not self._backend.history_enabled():
            self._refuse("the script switched memory history off meanwhile.")
            return
        self._job = None
        try:
            snapshot = self._backend.full_snapshot(traces=True)
        finally:
            self._backend.stop_history()
        if snapshot is not None:
            write_snapshot(sibling_path(self._sample, SNAPSHOT_SUFFIX), snapshot)
            self._requests.answer("done")

    def _drop(self) -> None:
        """The request was withdrawn, or another one took its place."""
        job, self._job = self._job, None
        if job and job.started is not None:
            self._backend.call_soon(self._errors.quiet(self._stop_history))

    def _stop_history(self) -> None:
        with self._errors.swallow("capture"):
            is_wanted = self._job is not None and self._job.started is not None
            if not is_wanted and self._backend.history_enabled():
                self._backend.stop_history()

    def _refuse(self, reason: str) -> None:
        self._drop()
        self._requests.answer("refused", reason)
