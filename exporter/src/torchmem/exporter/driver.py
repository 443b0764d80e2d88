"""NVML across scrapes: opened on demand, again with growing pauses after a failure; every GPU is remembered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torchmem.exporter.gpu import GpuFault, GpuIdentity, GpuLabels, Nvml, NvmlDownError

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


Asking = Callable[[GpuLabels], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Roll:
    """Who answered: the GPUs by index, and the labels of the lost ones with NVML's return code where there is one."""

    present: tuple[GpuIdentity, ...]
    lost: Mapping[GpuLabels, int | None]


class Driver:
    """Owns an `Nvml`. `known` keeps every GPU that was ever seen, so that a lost one stays a series."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self.nvml = nvml
        self.known: Mapping[str, GpuIdentity] = {}
        self._clock = clock
        self._is_open = False
        self._slots: dict[int, GpuIdentity] = {}
        self._failure: NvmlDownError | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._retry_at = 0.0

    def roll_call(self, hung: Collection[GpuLabels] = (), asking: Asking = nullcontext) -> Roll:
        """Ask every GPU for its identity but those that are `hung`, each call within `asking` of its labels.

        Raises NvmlDownError, also while it waits before the next attempt.
        """
        self._open()
        answers = self._answers({index for index, _ in hung}, asking)
        present = {answer.uuid: answer for answer in answers if isinstance(answer, GpuIdentity)}
        faults = [answer for answer in answers if isinstance(answer, GpuFault)]
        lost: dict[GpuLabels, int | None] = {
            self._place(fault.index, present): fault.code for fault in faults
        }
        placed = {uuid for _, uuid in [*lost, *hung]}
        self.nvml.keep({*present, *(uuid for _, uuid in hung)})
        for uuid, gpu in self.known.items():
            if uuid not in present and uuid not in placed:
                lost[gpu.labels] = self.nvml.fault(uuid)
        self._slots |= {gpu.index: gpu for gpu in present.values()}
        self.known = {**self.known, **present}
        return Roll(tuple(present.values()), lost)

    def _answers(self, left_out: Collection[str], asking: Asking) -> list[GpuIdentity | GpuFault]:
        answers = []
        for index in range(self.nvml.count()):
            if str(index) not in left_out:
                with asking(self._place(index, {})):
                    answers.append(self.nvml.gpu(index))
        return answers

    def fail(self, error: NvmlDownError, *, in_use: bool = False) -> None:
        """NVML as a whole stopped answering: let it go and try again later; while waiting, nothing is new.

        `in_use`: a call in another thread has not returned, and NVML must not be shut down under it.
        """
        if error is self._failure:
            return
        if self._failure is None or self._failure.reason != error.reason:
            _log.warning(
                "%s; trying again with pauses of up to %.0f s", error, LONGEST_PAUSE_SECONDS
            )
        if not in_use:
            self.close()
        self._failure = error
        self._retry_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def close(self) -> None:
        """Let NVML go."""
        if self._is_open:
            self._is_open = False
            self.nvml.close()

    def _open(self) -> None:
        if self._failure is not None and self._clock() < self._retry_at:
            raise self._failure
        if self._is_open:
            return
        self.nvml.open()
        self._is_open, self._slots = True, {}

    def succeed(self) -> None:
        """Everything answered: the next failure starts with a short pause again."""
        if self._failure is not None:
            _log.info("NVML answers again")
        self._failure, self._pause = None, FIRST_PAUSE_SECONDS

    def _place(self, index: int, present: Mapping[str, GpuIdentity]) -> GpuLabels:
        """Name the GPU of a faulty index by what answered there before, unless that one answers elsewhere."""
        before = self._slots.get(index)
        uuid = before.uuid if before is not None and before.uuid not in present else ""
        return str(index), uuid
