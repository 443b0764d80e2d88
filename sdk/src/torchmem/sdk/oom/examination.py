"""What the SDK does first at an OOM: read the state that it left, find its cause, and count it.

This runs inside the allocator's OOM observer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmem.allocator.fragmentation import measurement
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.oom_cause import OomEvidence, largest_free_blocks
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.explain.call_stack import Origin, public_place
from torchmem.explain.lines import lines
from torchmem.explain.oom_report import OomReport
from torchmem.explain.verdict import (
    Circumstances,
    OnsetEvidence,
    Verdict,
    judge,
    judge_library,
    judge_wake_up,
)
from torchmem.sample.remedy_words import RemedyKind
from torchmem.sample.sample import Layout, OomCause, OomRecord
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import FailedAllocation, MeasuredSnapshot, OomObservation
from torchmem.sdk.oom.ending import LibraryOom
from torchmem.sdk.part import Part
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.managed import managed_bytes
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.errors import Stage


class OomExaminer(Part):
    """Examines and counts the OOMs of all devices.

    `about` is all but what the records add. `is_new_phase` returns whether no phase of this name
    was measured on the device.
    """

    stage: Stage = "oom"

    def __init__(
        self,
        recorder: Recorder,
        is_new_phase: Callable[[int, str | None], bool] = lambda _device, _name: True,
    ) -> None:
        self._recorder = recorder
        self._is_new_phase = is_new_phase
        self._counts: dict[int, dict[OomCause, int]] = {}
        self._newest: dict[int, OomRecord] = {}
        # For each device, what was judged at its newest OOM in PyTorch's allocator.
        self._judged: dict[int, tuple[OomEvidence, Circumstances]] = {}

    def examine(self, failed: FailedAllocation, about: Circumstances) -> OomObservation:
        """Examine a request that PyTorch's allocator could not serve."""

        def call() -> OomObservation:
            record = self._recorder.records()[failed.device]
            return self._examined(record, failed, self._completed(about, record))

        return self._counted(self._recorder.after_oom_read(call))

    def examine_library(self, failed: LibraryOom, about: Circumstances) -> OomObservation | None:
        """Examine a library's failed allocation; return None without any device.

        The error does not name the device, so the one with the most reserved memory is used; that
        of an engine is known.
        """

        def call() -> OomObservation | None:
            record = self._failed_in(failed)
            if record is None:
                return None
            return self._examined_library(record, failed, self._completed(about, record))

        observation = self._recorder.after_oom_read(call)
        return observation and self._counted(observation)

    def _failed_in(self, failed: LibraryOom) -> DeviceRecord | None:
        records = self._recorder.records()
        if failed.wake_up is not None:
            return records.get(failed.wake_up.device)
        return max(records.values(), key=DeviceRecord.reserved_bytes, default=None)

    def _completed(self, about: Circumstances, record: DeviceRecord) -> Circumstances:
        """Return the circumstances, with what the device's record knows."""
        active = record.allocator.active_bytes.total if record.allocator else None
        is_new = self._is_new_phase(record.device.index, about.phase)
        history = record.run_history.published()
        freed = record.freed_bytes
        return replace(about, active=active, freed=freed, history=history, is_new_phase=is_new)

    def _counted(self, observation: OomObservation) -> OomObservation:
        """Count the OOM, and then add what the lines hold, which may fail."""
        device, oom = observation.device, observation.oom
        counts = self._counts.get(device, {})
        self._counts[device] = {**counts, oom.cause: counts.get(oom.cause, 0) + 1}
        self._newest[device] = oom
        with self._recorder.errors.suppress("oom"):
            segments = observation.snapshot.segments if observation.snapshot else ()
            return replace(observation, lines=lines(segments, device))
        return observation

    def judge_garbage(self, device: int, freed: int) -> OnsetEvidence | None:
        """Return the onset of the newest OOM if it is garbage, of which `freed` bytes were freed.

        For the end of the process, after the collection that freed them: the request must fit now.
        """
        judged = self._judged.get(device)
        if judged is None or not self._fits(device, judged[0].requested):
            return None
        evidence, about = judged
        why = judge(evidence, None, replace(about, garbage=freed)).why
        if why is None or why.onset != "garbage":
            return None
        self._newest[device] = replace(self._newest[device], onset=why.onset)
        return why

    def advise(self, report: OomReport, remedy: RemedyKind) -> None:
        """Add the first advice of its report to the newest OOM of a device."""
        newest = self._newest.get(report.device.index)
        if newest and newest.timestamp == report.oom.timestamp:
            self._newest[report.device.index] = replace(newest, remedy=remedy)

    def _fits(self, device: int, requested: int) -> bool:
        """Return whether the allocator could serve a request now; True without a snapshot."""
        segments = self._snapshot()
        if segments is None:
            return True
        config = AllocatorConfig.of(self._recorder.settings)
        available = AvailableMemory(self._recorder.obtainable_from_driver(device))
        layout = measurement(segments, device, time.time(), available, config).layout
        return layout.headroom_flush_bytes is None or layout.headroom_flush_bytes >= requested

    def _snapshot(self) -> list[SegmentInfo] | None:
        with self._recorder.errors.suppress("oom"):
            return self._recorder.backend.memory_snapshot()
        return None

    def complete(self, sample: Draft) -> None:
        """Add the counts and the newest OOM."""
        for device in sample.devices:
            if device.index in self._newest:
                device.count(ooms=self._counts[device.index])
                device.add(last_oom=self._newest[device.index])

    def _examined(
        self, record: DeviceRecord, failed: FailedAllocation, about: Circumstances
    ) -> OomObservation:
        """Measure what the allocator kept after it returned its cache.

        The statistics in `record` must have been read inside the same observer call.
        """
        backend, config = self._recorder.backend, AllocatorConfig.of(self._recorder.settings)
        index, now, segments = record.device.index, time.time(), self._snapshot()
        layout = None
        if segments is not None:
            reserved = record.reserved_bytes()
            available = AvailableMemory(failed.driver_free, reserved, failed.limit)
            record.measured = measurement(segments, index, now, available, config)
            layout = record.layout
        evidence = _evidence(failed, record, layout, config)
        blocks = None
        if segments is not None:
            stream = backend.current_stream(index)
            blocks = largest_free_blocks(segments, index, evidence.requested, stream)
        verdict = judge(evidence, blocks, about)
        self._judged[index] = evidence, about
        return OomObservation(
            index,
            _record(now, failed.requested, verdict, failed.origin),
            failed.driver_free,
            _limit(evidence.limit, evidence.total),
            layout,
            record.periodic_layout,
            failed.origin,
            verdict=verdict,
            snapshot=_snapshot(segments, now, record, config),
            gradients_enabled=failed.gradients_enabled,
        )

    def _examined_library(
        self, record: DeviceRecord, failed: LibraryOom, about: Circumstances
    ) -> OomObservation:
        """Measure what a library's failed allocation left.

        The statistics in `record` must be new. PyTorch's cache is still as it was at the failure.
        """
        backend, config = self._recorder.backend, AllocatorConfig.of(self._recorder.settings)
        index, now, segments = record.device.index, time.time(), self._snapshot()
        free, total = backend.free_bytes(index) or 0, record.device.total_bytes
        if segments is not None:
            record.measured = measurement(segments, index, now, AvailableMemory(free), config)
        request = FailedAllocation(index, failed.requested or 0, total or 0, free)
        evidence = _evidence(request, record, record.layout, config)
        self._judged.pop(index, None)
        cached = record.layout.releasable_bytes if record.layout else None
        verdict = _library_verdict(evidence, cached, about, failed)
        oom = _record(now, failed.requested, verdict, failed.origin)
        return OomObservation(
            index,
            replace(oom, at_wake_up=failed.wake_up is not None),
            free,
            _limit(backend.limit_bytes(index), total),
            record.layout if segments is not None else None,
            record.periodic_layout,
            failed.origin,
            verdict=verdict,
            snapshot=_snapshot(segments, now, record, config),
        )


def _library_verdict(
    evidence: OomEvidence, cached: int | None, about: Circumstances, failed: LibraryOom
) -> Verdict:
    if failed.wake_up is not None:
        reserved = max(0, evidence.reserved - failed.wake_up.asleep)
        return judge_wake_up(replace(evidence, reserved=reserved), cached, about)
    if failed.cause is None:  # PyTorch's own request, of which only this is known
        return judge(replace(evidence, requested=evidence.driver_free + 1), None, about)
    if failed.cause != "library":
        return Verdict(failed.cause, None, None)
    return judge_library(evidence, cached, about)


def _record(
    now: float, requested: int | None, verdict: Verdict, origin: Origin | None
) -> OomRecord:
    onset = verdict.why.onset if verdict.why else None
    line, function = _place(origin)
    return OomRecord(now, requested, verdict.cause, verdict.detail, line, function, onset)


def _place(origin: Origin | None) -> tuple[str, str] | tuple[None, None]:
    own = origin.own if origin else None
    return public_place(own) if own else (None, None)


def _snapshot(
    segments: Sequence[SegmentInfo] | None,
    timestamp: float,
    record: DeviceRecord,
    config: AllocatorConfig,
) -> MeasuredSnapshot | None:
    if segments is None or record.layout is None:
        return None
    return MeasuredSnapshot(segments, timestamp, [(record.device, record.layout)], config)


def _limit(limit: int | None, total: int | None) -> int | None:
    """Return a limit that is lower than the device's memory; None without one."""
    return limit if limit is not None and total is not None and limit < total else None


def _evidence(
    failed: FailedAllocation, record: DeviceRecord, layout: Layout | None, config: AllocatorConfig
) -> OomEvidence:
    """Return the evidence of the OOM; without a snapshot all free bytes count as default pools'."""
    reserved = record.reserved_bytes()
    unused = reserved - record.allocator.active_bytes.total if record.allocator else 0
    return OomEvidence(
        requested=failed.requested,
        limit=failed.limit,
        driver_free=failed.driver_free,
        cached_free=layout.free_bytes if layout else unused,
        reserved=reserved,
        total=record.device.total_bytes,
        shares_host_memory=record.device.shares_host_memory,
        managed=managed_bytes(sys.modules).get(record.device.index, 0),
        private_free=layout.private_free_bytes if layout else 0,
        large_segment=config.large_segment_size,
        communicators=record.communicators,
    )
