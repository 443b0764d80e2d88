"""Requests to return memory: from `torchmem release`, and from neighbors on the same GPU.

A request is served at the end of a step, in the training thread. If no step comes because the
process is idle, only the cache is emptied: between two bytecodes of the main thread, or by the
background thread while the main thread waits, as at the prompt of a notebook.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmem.sample.native_threads import Lock
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.release_messages import (
    ANSWER_SUFFIX,
    REQUEST_SUFFIX,
    ReleaseAnswer,
    ReleaseRequest,
    decode_request,
)
from torchmem.sdk.publish.request_files import RequestFile
from torchmem.sdk.release.cache import Released
from torchmem.sdk.release.release import Release, ReleaseRefusedError
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import call_if_free

# How long an idle main thread has to run a release itself.
MAIN_THREAD_SECONDS = 0.2
# How long a request waits for the end of a step.
MAX_WAIT_SECONDS = 120.0

Act = Callable[[ReleaseRequest], Released]
"""Serves a request."""


@dataclass(slots=True)
class _Job:
    """A granted request; times in seconds of a monotonic clock, CPU time of the main thread."""

    request: ReleaseRequest
    granted: float
    asked_main: float | None = None
    main_cpu: float = 0.0


class ReleaseRequests:
    """Serves one request at a time.

    The background thread calls `tick`, the training thread `serve`; neither waits for the other.
    """

    def __init__(
        self,
        sample: Path,
        release: Release,
        errors: Errors,
        clock: Callable[[], float] = time.monotonic,
        main_cpu: Callable[[], float] | None = None,
    ) -> None:
        """Serve the requests in files next to this process's `sample` file.

        `main_cpu` returns the main thread's CPU time.
        """
        self._sample = sample
        self._requests: RequestFile[ReleaseRequest] = RequestFile(
            sample, REQUEST_SUFFIX, ANSWER_SUFFIX, decode_request
        )
        self._release = release
        self._errors = errors
        self._clock = clock
        self._main_cpu = main_cpu or _main_thread_cpu
        self._job: _Job | None = None
        self._lock = Lock()
        self._was_served_here = False

    @property
    def is_busy(self) -> bool:
        """Whether a request waits to be served."""
        return self._job is not None

    def tick(self, *, is_idle: bool, waits: bool = False) -> bool:
        """Look for a new request, and serve one that no step will serve.

        `is_idle`: whether no step is expected soon. While the script says that it `waits`, a new
        request is served at once. Return whether one was served in this thread, because the main
        thread does nothing.
        """
        is_idle = is_idle and not self._release.must_not_release
        self._was_served_here = False
        if call_if_free(self._lock, lambda: self._tick(is_idle, waits)):
            self._release.backend.call_soon(self._in_main_thread)
        return self._was_served_here

    def _tick(self, is_idle: bool, waits: bool) -> bool:
        """Return whether to ask the main thread to serve the request."""
        with self._errors.suppress("release"):
            if self._requests.changed():
                self._job = None
                self._accept()
            if self._job and waits and not self._release.must_not_release:
                self._serve_here(self._job)
            elif self._job and is_idle:
                return self._serve_idle(self._job)
            elif self._job:
                self._job.asked_main = None
                if self._clock() - self._job.granted > MAX_WAIT_SECONDS:
                    self._refuse(f"no step ended within {MAX_WAIT_SECONDS:g} s.")
        return False

    def serve(self) -> None:
        """Serve the request that waits, at the end of a step or where the script itself waits."""
        call_if_free(self._lock, lambda: self._serve_if_ready(self._release.on_request))

    def _serve_if_ready(self, act: Act) -> None:
        with self._errors.suppress("release"):
            if self._job and not self._release.must_not_release:
                self._serve(self._job, act)

    def _accept(self) -> None:
        request = self._requests.read(self._refuse)
        if request is not None:
            self._job = _Job(request, self._clock())
            self._answer(ReleaseAnswer(self._requests.request_ns, "waiting", {}))

    def _serve_idle(self, job: _Job) -> bool:
        """Serve in this thread if the main thread does nothing; return whether to ask it first."""
        now, cpu = self._clock(), self._main_cpu()
        if job.asked_main is None or cpu != job.main_cpu:
            job.asked_main, job.main_cpu = now, cpu
            return True
        if now - job.asked_main >= MAIN_THREAD_SECONDS:
            self._serve_here(job)
        return False

    def _serve_here(self, job: _Job) -> None:
        self._was_served_here = True
        self._serve(job, self._release.beside_main_thread)

    def _in_main_thread(self) -> None:
        call_if_free(self._lock, lambda: self._serve_if_ready(self._release.while_idle))

    def _serve(self, job: _Job, act: Act) -> None:
        self._job = None
        try:
            released, seconds = act(job.request)
        except ReleaseRefusedError as refused:
            self._refuse(str(refused))
        except Exception as error:
            self._refuse(f"it failed in the process ({type(error).__name__}: {error}).")
            raise
        else:
            note = self._release.note
            self._answer(
                ReleaseAnswer(self._requests.request_ns, "done", released, seconds, note=note)
            )
        finally:
            if job.request.asker == "neighbors":
                # No process waits for the answer, and another neighbor may ask again.
                sibling_path(self._sample, REQUEST_SUFFIX).unlink(missing_ok=True)

    def _refuse(self, reason: str) -> None:
        self._job = None
        note = self._release.note
        self._answer(ReleaseAnswer(self._requests.request_ns, "refused", {}, 0.0, reason, note))

    def _answer(self, answer: ReleaseAnswer) -> None:
        self._requests.answer(answer)


def _main_thread_cpu() -> float:
    """Return the CPU time of the main thread in seconds.

    The clock is Linux's for its thread (include/linux/posix-timers.h), whose identifier is that of
    the process. `time.pthread_getcpuclockid` would read the memory at `main_thread().ident`, and
    with gevent no thread is there.
    """
    return time.clock_gettime((~os.getpid() << 3) | 6)
