"""The setting `capture_on_oom="trace"`: a recording that a replay can use, kept at an OOM.

PyTorch records allocations without stacks from the first one on, in a ring of OOM_TRACE_ENTRIES.
`torchmem whatif` and `torchmem run --apply-advice` replay what is kept.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import PROCESS_FORM
from torchmem.sdk.capture.capture import write_snapshot
from torchmem.sdk.capture.recorded_history import RecordedHistory
from torchmem.sdk.oom.observation import keep_newest
from torchmem.sdk.safety.cost import OOM_TRACE_BUDGET, OOM_TRACE_RESERVE_SECONDS, Allowance
from torchmem.sdk.safety.errors import Errors, log

MAX_RECORDINGS_PER_USER = 8

_RECORDING_NAME = re.compile(rf"{PROCESS_FORM}{re.escape(OOM_RECORDING_SUFFIX)}")


class OomTrace:
    """Records from `begin` on, and writes a file beside this process's sample at each OOM.

    The file is removed instead if OOMs come so often that writing it would cost too much, since it
    would be that of another OOM.
    """

    def __init__(
        self,
        history: RecordedHistory,
        sample: Path,
        errors: Errors,
        clock: Callable[[], float] = time.monotonic,
        *,
        with_stacks: bool = False,
    ) -> None:
        """`with_stacks`: record fewer entries, with stacks, which show the lines that leak."""
        self.is_recording = False
        self._with_stacks = with_stacks
        self._history = history
        self._path = sibling_path(sample, OOM_RECORDING_SUFFIX)
        self._errors = errors
        self._clock = clock
        self._allowance = Allowance(OOM_TRACE_BUDGET, OOM_TRACE_RESERVE_SECONDS)

    def begin(self) -> None:
        """Start recording, unless the script records or the allocator cannot."""
        with self._errors.suppress("capture"):
            self.is_recording = self._start()
            if not self.is_recording:
                log(
                    logging.WARNING,
                    'capture_on_oom="trace" needs PyTorch 2.11 and its native allocator, and a '
                    "script that records no memory history: a snapshot without a trace is kept.",
                )

    def _start(self) -> bool:
        is_possible = self._history.start_trace()
        if not is_possible or not self._with_stacks:
            return is_possible
        self._history.backend.end_trace(lambda _: None)
        return self._history.start()

    def keep(self) -> None:
        """Write what led to an OutOfMemoryError."""
        with self._errors.suppress("capture"):
            started = self._clock()
            if not self._allowance.is_left(started, resuming=True):
                self._path.unlink(missing_ok=True)
                return
            try:
                self._write()
            finally:
                ended = self._clock()
                self._allowance.spend(ended, ended - started)

    def _write(self) -> None:
        snapshot = self._history.trace()
        if snapshot is not None:
            write_snapshot(self._path, snapshot)
            keep_newest(self._path.parent, MAX_RECORDINGS_PER_USER, _RECORDING_NAME)

    def end(self) -> None:
        """Stop recording, unless the script has started its own recording since."""
        with self._errors.suppress("capture"):
            if self.is_recording:
                self.is_recording = False
                self._history.stop()
                self._history.backend.end_trace(lambda _: None)
