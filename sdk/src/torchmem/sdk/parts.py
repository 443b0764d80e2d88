"""The list of all parts. To add one, write its class in a new file, and add a line here.

At a step, a tick, and an OOM they are called in this order. At an OOM the report comes first, then
the map, the recording, and the parts that may release memory. They end in the reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchmem.sdk.capture.capture import Capture
from torchmem.sdk.capture.line_history import LineHistory
from torchmem.sdk.capture.oom_trace import OomSnapshot, OomTrace
from torchmem.sdk.capture.recorded_history import RecordedHistory
from torchmem.sdk.context import Context
from torchmem.sdk.monitor import Monitor
from torchmem.sdk.oom.garbage import GarbageMeter
from torchmem.sdk.oom.reports import OomReports
from torchmem.sdk.part import Part
from torchmem.sdk.publish.memory_map import MapPublisher
from torchmem.sdk.publish.optional import OtlpOutput, OwnPort, TextfileOutput
from torchmem.sdk.reading.communicators import CommunicatorReader
from torchmem.sdk.reading.growth import GrowthJudge
from torchmem.sdk.reading.host import HostReader
from torchmem.sdk.reading.managed import ManagedMemory
from torchmem.sdk.reading.plan import PlannedPeaks
from torchmem.sdk.reading.rmm import RmmReader
from torchmem.sdk.release.part import ReleasePart
from torchmem.sdk.release.release import Release
from torchmem.sdk.run_summaries import RunSummaries
from torchmem.sdk.safety.errors import Errors


def build(context: Context, monitor: Monitor) -> Iterator[Part]:
    """Yield the parts of a monitor that is about to start."""
    settings, backend, errors = context.settings, context.backend, context.errors
    recorder, path = context.recorder, monitor.path
    history = RecordedHistory(backend, recorder.allocated_peaks)
    growth = GrowthJudge(recorder, settings.interval, lambda: monitor.has_ended)
    communicators = CommunicatorReader(recorder)
    lines = LineHistory(settings, recorder, errors, context.cost, growth.judged)
    release = Release(
        recorder, errors, settings, context.phases.reset, context.hooks, context.engine
    )

    def stop_own_recordings() -> None:
        lines.stop()
        recorder.stop_recording()

    yield context.uncaught
    yield context.ooms
    yield context.phases
    yield HostReader(backend)
    yield communicators
    yield RmmReader(recorder)
    yield ManagedMemory()
    yield growth
    yield PlannedPeaks(context.plan, recorder)
    yield context.engine
    yield context.evaluation
    yield _reports(context, monitor, lines)
    yield RunSummaries(path)
    yield _map(monitor, errors, enabled=settings.memory_map)
    yield from _recordings(context, path, history)
    if settings.history:
        monitor.on_early_read = errors.suppressing(lines.stage, lines.at_early_read)
        yield lines
    context.release = _release(context, monitor, release, communicators)
    yield context.release
    yield Capture(history, path, errors, before_start=stop_own_recordings)
    yield from _outputs(context, monitor)


def _reports(context: Context, monitor: Monitor, lines: LineHistory) -> OomReports:
    """Return the part that reports OOMs, with what an uncaught exception needs of it."""
    settings, backend, errors = context.settings, context.backend, context.errors
    reports = OomReports(
        monitor.path,
        backend,
        errors,
        monitor.sample,
        lambda: monitor.is_dying,
        lines.compared if settings.history else None,
        GarbageMeter(backend, errors) if settings.collect_on_oom else None,
        context.ooms.judge_garbage,
        context.ooms.advise,
    )
    context.uncaught.at_death(reports.at_death)
    if settings.note_on_oom:
        context.uncaught.explain(reports.note)
    return reports


def _release(
    context: Context, monitor: Monitor, release: Release, communicators: CommunicatorReader
) -> ReleasePart:
    """Return the part that releases memory, with what is read after it has."""

    def snapshot_after_release() -> None:
        monitor.reader.snapshot_here()
        monitor.measure()

    return ReleasePart(
        release, monitor.path, context.clock, snapshot_after_release, communicators.read_now
    )


def _map(monitor: Monitor, errors: Errors, *, enabled: bool) -> Part:
    maps = MapPublisher(
        monitor.path,
        enabled=enabled,
        is_pending=lambda: monitor.oom_pending,
        request_snapshot=monitor.reader.request_snapshot,
    )
    monitor.on_snapshot = errors.suppressing(maps.stage, maps.at_snapshot)
    return maps


def _recordings(context: Context, path: Path, history: RecordedHistory) -> Iterator[Part]:
    """Yield the part that saves what led to an OOM."""
    settings = context.settings
    if settings.capture_on_oom == "trace":
        stacks = settings.history is True
        yield OomTrace(
            history,
            path,
            lambda: context.is_exiting,
            with_stacks=stacks,
            log_later=context.errors.log_later,
        )
    elif settings.capture_on_oom:
        yield OomSnapshot(context.backend, path)


def _outputs(context: Context, monitor: Monitor) -> Iterator[Part]:
    """Yield the parts that publish the samples outside the file."""
    settings, errors = context.settings, context.errors
    if settings.textfile is not None:
        yield TextfileOutput(settings.textfile)
    if settings.port is not None:
        yield OwnPort(settings, monitor.process.local_rank or 0, monitor.sample, errors)
    if settings.otlp:
        yield OtlpOutput(monitor.sample, errors)
