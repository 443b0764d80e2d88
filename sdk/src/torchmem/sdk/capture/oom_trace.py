"""The setting `capture_on_oom`: a snapshot of the newest OOM, or a recording that led to it.

With "trace" PyTorch records allocations without stacks from the first one on, in a ring of
OOM_TRACE_ENTRIES. `torchmem whatif` and `torchmem run --apply-advice` replay what is kept.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from torchmem.allocator.backend import Backend
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX, OOM_SNAPSHOT_SUFFIX
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import PROCESS_FORM
from torchmem.sdk.capture.capture import write_snapshot
from torchmem.sdk.capture.recorded_history import RecordedHistory
from torchmem.sdk.observation import Oom
from torchmem.sdk.oom.report_writer import keep_newest
from torchmem.sdk.part import Part
from torchmem.sdk.safety.cost import OOM_TRACE_BUDGET, OOM_TRACE_RESERVE_SECONDS, Allowance
from torchmem.sdk.safety.errors import Stage, log

MAX_RECORDINGS_PER_USER = 8

_RECORDING_NAME = re.compile(rf"{PROCESS_FORM}{re.escape(OOM_RECORDING_SUFFIX)}")


class OomSnapshot(Part):
    """Writes a file beside this process's sample at each OOM, in place of the previous one."""

    stage: Stage = "capture"

    def __init__(self, backend: Backend, sample: Path) -> None:
        self._backend = backend
        self._snapshot_path = sibling_path(sample, OOM_SNAPSHOT_SUFFIX)

    def at_oom(self, oom: Oom) -> None:  # noqa: ARG002
        """Write the state that the OOM left."""
        snapshot = self._backend.full_snapshot(traces=False)
        if snapshot is not None:
            write_snapshot(self._snapshot_path, snapshot)


class OomTrace(OomSnapshot):
    """Records from `begin` on, and writes a file beside this process's sample at each OOM.

    The file is removed instead if OOMs come so often that writing it would cost too much, since it
    would be that of another OOM.
    """

    def __init__(  # noqa: PLR0913 - the last ones are options
        self,
        history: RecordedHistory,
        sample: Path,
        is_exiting: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        *,
        with_stacks: bool = False,
        log_later: Callable[..., None] = log,
    ) -> None:
        """`with_stacks`: record fewer entries, with stacks, which show the lines that leak.

        At the exit of the interpreter, see `is_exiting`, the recording is left as it is.
        `log_later` is `Errors.log_later`.
        """
        super().__init__(history.backend, sample)
        self._is_recording = False
        self._is_exiting = is_exiting
        self._with_stacks = with_stacks
        self._log_later = log_later
        self._history = history
        self._path = sibling_path(sample, OOM_RECORDING_SUFFIX)
        self._clock = clock
        self._allowance = Allowance(OOM_TRACE_BUDGET, OOM_TRACE_RESERVE_SECONDS)

    def begin(self) -> None:
        """Start recording, unless the script records or the allocator cannot."""
        self._is_recording = self._start()
        if not self._is_recording:
            self._log_later(
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

    def at_oom(self, oom: Oom) -> None:
        """Write what led to the OOM, or without a recording the state that it left."""
        if self._is_recording:
            self.keep()
        else:
            super().at_oom(oom)

    def keep(self) -> None:
        """Write what was recorded; remove it instead if writing has taken too much time."""
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

    def end(self, *, may_read: bool) -> None:
        """Stop recording, unless the script has started its own recording since."""
        if may_read and self._is_recording and not self._is_exiting():
            self._is_recording = False
            self._history.stop()
            self._history.backend.end_trace(lambda _: None)
