"""The part that reports OOMs, with details of lines and tensors at a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchmem.allocator.backend import Backend
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.lines import divided
from torchmem.sample.sample import Sample
from torchmem.sdk.observation import Oom, OomObservation
from torchmem.sdk.oom.module_names import ModuleNames
from torchmem.sdk.oom.report_writer import ReportWriter
from torchmem.sdk.part import Part
from torchmem.sdk.safety.cost import OOM_DETAILS_BUDGET, OOM_DETAILS_RESERVE_SECONDS, Allowance
from torchmem.sdk.safety.errors import Errors, Stage


class OomReports(Part):
    """Writes a report at each OOM.

    `sample` returns the current state, and `is_pending` whether the process may die of the newest
    OOM. `compared` adds the lines that grew; None if no stacks are recorded.
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
    ) -> None:
        self._writer = ReportWriter(path)
        self._details = OomDetails(backend)
        self._errors = errors
        self._sample = sample
        self._is_pending = is_pending
        self._compared = compared

    def at_oom(self, oom: Oom) -> None:
        """Write the report."""
        if oom.observation:
            oom.observation = self._detailed(oom.observation)
            self._writer.write(oom.observation, self._sample())

    def _detailed(self, observation: OomObservation) -> OomObservation:
        """Add which lines grew, who called them for which module, and what the tensors are."""
        with self._errors.suppress("history"):
            if self._compared:
                observation = self._compared(observation)
            observation = self._details.divide(observation)
            if self._compared:
                tensors = self._details.tensors(observation.device)
                observation = replace(observation, tensors=tensors)
        return observation

    def add_tensors(self) -> None:
        """Add to the newest report what the tensors are, as the process dies of that OOM."""
        if self._is_pending():
            self._writer.add_tensors(self._details.tensors)

    def note(self) -> tuple[str, ...]:
        """Return what a traceback says about the newest OOM; nothing if the process survived it."""
        from torchmem.explain.traceback_note import note_lines

        newest = self._writer.newest()
        return note_lines(*newest) if newest else ()

    def at_publish(self, sample: Sample, *, routine: bool) -> None:
        """Keep the sample for the trend, and mark the reports that the process has survived."""
        if routine:
            self._writer.remember(sample)
            self._writer.mark_survived(self._is_pending)

    def end(self, *, may_read: bool) -> None:  # noqa: ARG002
        """Mark reports for the last time, and give back the room for one."""
        try:
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

    def _has_time(self) -> bool:
        return self._allowance.is_left(time.perf_counter(), resuming=False)

    def _spend(self, started: float) -> None:
        self._allowance.spend(time.perf_counter(), time.thread_time() - started)
