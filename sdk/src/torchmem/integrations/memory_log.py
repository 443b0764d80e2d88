"""Shared by the loggers for experiment trackers: a rank's scalars, and when they are logged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.repeating import Repeating
from torchmem.sample.sample import DeviceSample, Layout, Sample
from torchmem.sdk import Session

EVERY_SECONDS = 10.0
CLOSE_SECONDS = 0.5

Write = Callable[[dict[str, float], Sample], None]
"""Writes scalars by name, with the step and the time of the sample. May raise."""


class MemoryLog:
    """Writes the scalars of a session at an interval, and at its end.

    `write` is called in a separate thread with the newest sample that was published, if it is
    newer than the one before. What it raises is counted in `torchmem_sdk_errors_total`, and logged
    once. At the end of the session the process waits 0.5 s at most for the last call.
    """

    def __init__(self, session: Session, write: Write, every: float) -> None:
        self._session = session
        self._write = write
        self._written = 0.0
        self._pid = os.getpid()
        self._repeating = Repeating("torchmem-log", self._log, every, self._report)
        self._repeating.start()
        session.lifetime.at_close.append(self.close)

    def close(self) -> None:
        """Write once more and stop. Does nothing in a forked child."""
        if self._pid == os.getpid():
            self._repeating.close(CLOSE_SECONDS)

    def _log(self) -> None:
        sample = self._session.newest
        if sample and sample.timestamp != self._written:
            self._written = sample.timestamp
            self._write(scalars(sample), sample)

    def _report(self, failure: Exception | None) -> None:
        if failure:
            self._session.errors.count("tracker", failure)


def scalars(sample: Sample) -> dict[str, float]:
    """Return the scalars of a sample that are known, by name, such as torchmem/reserved_bytes.

    The names are those of the metrics. They contain the rank if there are several, and the device
    if the process has several.
    """
    process = sample.process
    prefix = "torchmem/" + (f"rank{process.rank}/" if (process.world_size or 1) > 1 else "")
    known: dict[str, float] = {}
    for device in sample.devices:
        place = prefix + (f"gpu{device.index}/" if len(sample.devices) > 1 else "")
        known |= {place + name: value for name, value in _of_device(device) if value is not None}
    return known


def _of_device(device: DeviceSample) -> Iterator[tuple[str, float | None]]:
    if (allocator := device.allocator) is not None:
        yield _name(catalog.ALLOCATED), allocator.allocated_bytes.total
        yield _name(catalog.ALLOCATED_PEAK), allocator.allocated_peak_bytes
        yield _name(catalog.RESERVED), allocator.reserved_bytes.total
    if device.layout is not None:
        yield from _of_layout(device.layout)
    for component, size in device.components.items():
        yield f"{_name(catalog.COMPONENT)}/{component}", size
    yield _name(catalog.ALLOC_RETRIES), device.counters.alloc_retries
    if device.counters.ooms is not None:
        yield _name(catalog.OOMS), sum(device.counters.ooms.values())


def _of_layout(layout: Layout) -> Iterator[tuple[str, float | None]]:
    yield f"{_name(catalog.FREE)}/stranded", layout.stranded_bytes
    yield f"{_name(catalog.FREE)}/releasable", layout.releasable_bytes
    yield _name(catalog.FRAGMENTATION), layout.fragmentation_ratio
    yield f"{_name(catalog.HEADROOM)}/without_flush", layout.headroom_bytes
    yield f"{_name(catalog.HEADROOM)}/with_flush", layout.headroom_flush_bytes


def _name(spec: MetricSpec) -> str:
    return spec.name.removeprefix("torchmem_")
