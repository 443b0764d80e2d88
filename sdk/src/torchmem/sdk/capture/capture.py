"""Capture on demand: record memory history for some steps and write a snapshot for memory_viz.

The `torchmem capture` command writes a request file beside the process's sample; only the process's
own user and root are trusted. Recording starts and ends in the training thread between two steps.
If no further step comes, the background thread ends it with `Backend.call_soon`, and the last step
is incomplete.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torchmem.sample.capture_messages import (
    ANSWER_SUFFIX,
    MAX_SNAPSHOT_BYTES,
    REQUEST_SUFFIX,
    SNAPSHOT_SUFFIX,
    START_GRACE_SECONDS,
    STOP_GRACE_SECONDS,
    AnswerState,
    CaptureAnswer,
    CaptureRequest,
    decode_request,
)
from torchmem.sample.native_threads import Lock
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import temporary_path
from torchmem.sdk.capture.recorded_history import RecordedHistory, kept_seconds
from torchmem.sdk.part import Part
from torchmem.sdk.publish.request_files import RequestFile
from torchmem.sdk.safety.errors import Errors, Stage
from torchmem.sdk.safety.interruptions import call_if_free

Action = Literal["wait", "start", "finish", "give_up"]


class _BoundedFile:
    """A file of at most MAX_SNAPSHOT_BYTES, because the run directory may be in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_SNAPSHOT_BYTES

    def write(self, data: bytes) -> int:
        """Append `data`. Raises OSError if the file would become too large."""
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"the snapshot is larger than {MAX_SNAPSHOT_BYTES >> 20} MiB")
        return self._file.write(data)


def write_snapshot(path: Path, snapshot: Mapping[str, Any]) -> None:
    """Replace `path` atomically with a pickle that only this user can read. Raises OSError."""
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            pickle.dump(snapshot, _BoundedFile(file))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class Job:
    """One granted request; times in seconds of a monotonic clock."""

    request: CaptureRequest
    granted: float
    started: float | None = None
    is_ending: bool = False


def next_action(job: Job, now: float, *, at_step: bool) -> Action:
    """Return what to do at `now`, at a step's end or elsewhere."""
    if job.started is None:
        if at_step:
            return "start"
        return "give_up" if now >= job.granted + START_GRACE_SECONDS else "wait"
    if job.is_ending and not at_step:
        return "wait"
    end = job.started + job.request.seconds
    return "finish" if now >= (end if at_step else end + STOP_GRACE_SECONDS) else "wait"


class Capture(Part):
    """Serves the capture requests of one process, one at a time.

    The background thread and the training thread do not wait for each other. `sample` is the path
    of this process's sample file, from which the other paths follow.
    """

    stage: Stage = "capture"

    def __init__(
        self,
        history: RecordedHistory,
        sample: Path,
        errors: Errors,
        clock: Callable[[], float] = time.monotonic,
        before_start: Callable[[], None] | None = None,
    ) -> None:
        """`before_start` stops a recording of the SDK's own."""
        self._history = history
        self._backend = history.backend
        self._before_start = before_start
        self._errors = errors
        self._sample = sample
        self._requests = RequestFile(sample, REQUEST_SUFFIX, ANSWER_SUFFIX, decode_request)
        self._clock = clock
        self._job: Job | None = None
        self._asked_to_finish = False
        self._lock = Lock()

    def at_tick(self) -> None:
        """Look for a new or withdrawn request, and end a recording that no step ends."""
        self._call_locked(self._tick)
        if self._job and self._job.is_ending and not self._asked_to_finish:
            self._asked_to_finish = True
            self._backend.call_soon(self._finish_late)

    def _tick(self) -> None:
        if self._requests.changed():
            self._cancel()
            self._accept()
        elif self._job:
            self._advance(self._job, at_step=False)

    def _finish_late(self) -> None:
        self._asked_to_finish = False
        self._call_locked(self._advance_ending)

    def _advance_ending(self) -> None:
        if self._job and self._job.is_ending:
            self._advance(self._job, at_step=True)

    @property
    def due_step(self) -> float:
        """The next step while a request is served."""
        return math.inf if self._job is None else 0

    def at_step(self) -> None:
        """Start or end a recording at a step's end."""
        self._call_locked(self._advance_at_step)

    def _advance_at_step(self) -> None:
        if self._job:
            self._advance(self._job, at_step=True)

    def end(self, *, may_read: bool) -> None:
        """Write what was recorded."""
        if may_read:
            self._call_locked(self._end)

    def _end(self) -> None:
        if self._job and self._job.started is not None:
            self._finish(self._job)
        elif self._job:
            self._refuse("the process ended before a step.")

    def _call_locked(self, call: Callable[[], None]) -> None:
        """Call holding the lock if it is free, and suppress errors."""

        def suppressing() -> None:
            with self._errors.suppress("capture"):
                call()

        call_if_free(self._lock, suppressing)

    def _accept(self) -> None:
        request = self._requests.read(self._refuse)
        if request is not None:
            self._job = Job(request, self._clock())
            self._answer("waiting")

    def _advance(self, job: Job, *, at_step: bool) -> None:
        now = self._clock()
        action = next_action(job, now, at_step=at_step)
        try:
            if action == "start":
                self._start(job, now)
            elif action == "finish" and at_step:
                self._finish(job)
            elif action == "finish":
                self._job = replace(job, is_ending=True)
            elif action == "give_up":
                self._refuse(
                    f"no step ended within {START_GRACE_SECONDS:g} s; in a loop without an "
                    "optimizer of torch.optim call session.step()."
                )
        except Exception as error:
            self._refuse(f"it failed in the process ({type(error).__name__}: {error}).")
            raise

    def _start(self, job: Job, now: float) -> None:
        if self._before_start:
            self._before_start()
        if self._backend.history_enabled() is None:
            self._refuse("this allocator, or this version of PyTorch, records no memory history.")
        elif self._history.start(job.request.max_entries):
            self._job = replace(job, started=now)
            self._answer("recording")
        else:
            self._refuse(
                "its memory history is being recorded already. Remove "
                "torch.cuda.memory._record_memory_history() from the script and "
                "capture_on_oom=trace from its settings, or save that recording in the script "
                "with torch.cuda.memory._dump_snapshot(FILE)."
            )

    def _finish(self, job: Job) -> None:
        if not self._backend.owns_history():
            self._refuse("the script turned memory history on or off during the recording.")
            return
        self._job = None
        try:
            snapshot = self._history.snapshot()
        finally:
            self._history.stop()
        if snapshot is not None:
            write_snapshot(sibling_path(self._sample, SNAPSHOT_SUFFIX), snapshot)
            self._answer("done", kept=kept_seconds(snapshot, job.request.max_entries))

    def _cancel(self) -> None:
        """Forget the job; its request was withdrawn, replaced, or refused."""
        job, self._job = self._job, None
        if job and job.started is not None:
            self._backend.call_soon(self._stop_history)

    def _stop_history(self) -> None:
        with self._errors.suppress("capture"):
            is_needed = self._job is not None and self._job.started is not None
            if not is_needed:
                self._history.stop()

    def _answer(
        self,
        state: AnswerState,
        reason: str | None = None,
        kept: tuple[bool, float | None] = (False, None),
    ) -> None:
        self._requests.answer(CaptureAnswer(self._requests.request_ns, state, reason, *kept))

    def _refuse(self, reason: str) -> None:
        self._cancel()
        self._answer("refused", reason)
