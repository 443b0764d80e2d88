"""The part that reports OOMs, with details of lines and tensors at a bounded cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchmem.allocator.backend import Backend
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.lines import divided
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedies import remedies
from torchmem.explain.traceback_note import note_lines
from torchmem.explain.verdict import OnsetEvidence
from torchmem.sample.remedy_words import RemedyKind
from torchmem.sample.sample import Sample
from torchmem.sdk.observation import Oom, OomObservation
from torchmem.sdk.oom.ending import keeps_frame
from torchmem.sdk.oom.garbage import MIN_BYTES, GarbageMeter
from torchmem.sdk.oom.last_error import kept_by_last_error
from torchmem.sdk.oom.module_names import ModuleNames
from torchmem.sdk.oom.report_writer import ReportWriter
from torchmem.sdk.part import Part
from torchmem.sdk.safety.cost import OOM_DETAILS_BUDGET, OOM_DETAILS_RESERVE_SECONDS, Allowance
from torchmem.sdk.safety.errors import Errors, Stage


class OomReports(Part):
    """Writes a report at each OOM.

    `sample` returns the current state, and `is_pending` whether the process may die of the newest
    OOM. `compared` adds the lines that grew; None if no stacks are recorded. `garbage` measures
    what Python's collector frees; None if it must not run. `judge_garbage` returns the onset if
    that is garbage, by the device and the bytes that were freed. `advise` is told the first advice
    of a report.
    """

    stage: Stage = "report"

    def __init__(  # noqa: PLR0913, PLR0917 - each is a collaborator
        self,
        path: Path,
        backend: Backend,
        errors: Errors,
        sample: Callable[[], Sample],
        is_pending: Callable[[], bool],
        compared: Callable[[OomObservation], OomObservation] | None,
        garbage: GarbageMeter | None,
        judge_garbage: Callable[[int, int], OnsetEvidence | None],
        advise: Callable[[OomReport, RemedyKind], None],
    ) -> None:
        self._writer = ReportWriter(path)
        self._details = OomDetails(backend)
        self._errors = errors
        self._sample = sample
        self._is_pending = is_pending
        self._compared = compared
        self._garbage = garbage
        self._judge_garbage = judge_garbage
        self._advise = advise

    def at_oom(self, oom: Oom) -> None:
        """Write the report."""
        if oom.observation:
            oom.observation = self._detailed(oom.observation)
            self._tell_advice(self._writer.write(oom.observation, self._sample()))
            if self._garbage:
                self._garbage.watch(oom.observation.device)

    def _detailed(self, observation: OomObservation) -> OomObservation:
        """Add which lines grew, who called them for which module, and what the tensors are."""
        with self._errors.suppress("history"):
            if self._compared:
                observation = self._compared(observation)
            observation = self._details.divide(observation)
            observation = self._details.add_last_error(observation)
            if self._compared:
                tensors = self._details.tensors(observation.device)
                observation = replace(observation, tensors=tensors)
        return observation

    def at_death(self, error: BaseException) -> None:
        """Add to the newest report what only the end shows, as the process dies of that OOM.

        `error` ends it. Each write may be the last one that succeeds.
        """
        if self._is_pending():
            self._writer.complete(self._with_tensors)
            self._writer.complete(lambda report: self._with_garbage(report, error))
            newest = self._writer.newest()
            if newest:
                self._tell_advice(newest[0])

    def _tell_advice(self, report: OomReport) -> None:
        first = next(iter(remedies(report)), None)
        if first and first.kind:
            self._advise(report, first.kind)

    def _with_tensors(self, report: OomReport) -> OomReport:
        if report.tensors:
            return report
        return replace(report, tensors=self._details.tensors(report.device.index))

    def _with_garbage(self, report: OomReport, error: BaseException) -> OomReport:
        """Add what a full collection frees, which may be the reason why memory ran out.

        Not at a prompt, which goes on, and not if what the failed function kept may be gone since.
        """
        own = report.origin.own if report.origin else None
        is_kept = own is None or keeps_frame(error, own.file, own.function)
        if self._garbage is None or report.garbage or hasattr(sys, "ps1") or not is_kept:
            return report
        garbage = self._garbage.measured(with_line=report.lines is not None)
        if garbage is None:
            return report
        report = replace(report, garbage=garbage)
        why = self._judge_garbage(report.device.index, garbage.bytes)
        if why is None or report.verdict is None:
            return report
        oom, verdict = replace(report.oom, onset=why.onset), replace(report.verdict, why=why)
        return replace(report, oom=oom, verdict=verdict)

    def note(self) -> tuple[str, ...]:
        """Return what a traceback says about the newest OOM; nothing if the process survived it."""
        newest = self._writer.newest()
        return note_lines(*newest) if newest else ()

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Keep the sample for the trend, and mark the reports that the process has survived."""
        if routine:
            self._writer.remember(sample)
            self._writer.mark_survived(self._is_pending)
            if self._garbage:
                self._garbage.expire(is_dying=self._is_pending())

    def end(self, *, may_read: bool) -> None:  # noqa: ARG002
        """Mark reports for the last time, and give back the room for one."""
        try:
            if self._garbage:
                self._garbage.stop()
            self._writer.mark_survived(self._is_pending)
        finally:
            self._writer.close()


class OomDetails:
    """Adds details while the allowance lasts; a batch-size search has an OOM for each size."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._allowance = Allowance(OOM_DETAILS_BUDGET, OOM_DETAILS_RESERVE_SECONDS)

    def divide(self, observation: OomObservation) -> OomObservation:
        """Divide what the lines hold by caller, and by module where it is known."""
        found, snapshot = observation.lines, observation.snapshot
        if found is None or snapshot is None or not self._has_time():
            return observation
        started, modules = time.thread_time(), self._backend.modules()
        module_of = ModuleNames(modules).of if modules else lambda _frames: None
        found = divided(found, snapshot.segments, observation.device, module_of)
        self._spend(started)
        return replace(observation, lines=found)

    def tensors(self, device: int) -> tuple[TensorGroup, ...]:
        """Return the tensors that are Python objects, in groups; empty if that is not known."""
        if not self._has_time():
            return ()
        started = time.thread_time()
        found = self._backend.python_tensors(device)
        self._spend(started)
        return found or ()

    def add_last_error(self, observation: OomObservation) -> OomObservation:
        """Add what the traceback of an earlier error keeps, where Python keeps one."""
        if not hasattr(sys, "last_traceback") or not self._has_time():
            return observation
        started = time.thread_time()
        kept = kept_by_last_error(partial(self._backend.storage, device=observation.device))
        self._spend(started)
        return replace(observation, last_error_bytes=kept if kept >= MIN_BYTES else None)

    def _has_time(self) -> bool:
        return self._allowance.is_left(time.perf_counter(), resuming=False)

    def _spend(self, started: float) -> None:
        self._allowance.spend(time.perf_counter(), time.thread_time() - started)
