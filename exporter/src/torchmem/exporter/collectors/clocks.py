"""Clocks, the reasons why they are lower than they could be, and the performance state."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family, known


def collect(reading: Reading) -> Iterator[Metric]:
    """Hertz by domain; 1 for each reason that holds and 0 for each that does not."""
    rows = [(gpu.labels, clocks) for gpu, clocks in reading.each(reading.nvml.clocks)]
    now = [
        ((*labels, domain), hertz)
        for labels, clocks in rows
        for domain, hertz in clocks.hertz.items()
    ]
    yield family(catalog.NVML_CLOCK, now)
    most = [
        ((*labels, domain), hertz)
        for labels, clocks in rows
        for domain, hertz in clocks.max_hertz.items()
    ]
    yield family(catalog.NVML_CLOCK_MAX, most)
    reasons = [
        ((*labels, reason), float(on))
        for labels, clocks in rows
        for reason, on in clocks.throttle.items()
    ]
    yield family(catalog.NVML_THROTTLE, reasons)
    yield family(
        catalog.NVML_PERFORMANCE_STATE,
        known((labels, clocks.performance_state) for labels, clocks in rows),
    )
