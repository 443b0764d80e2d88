"""The exporter watching itself: its version, its collectors, what it refused."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client.core import Metric

from torchmem.exporter.reading import Outcome
from torchmem.exporter.run_directory import Reason
from torchmem.sample import catalog
from torchmem.sample.families import family, info


def collect(outcomes: Sequence[Outcome], rejections: Mapping[Reason, int]) -> Iterator[Metric]:
    """One row per collector; a duration only where the collector came to an end."""
    facts = {"version": version("torchmem"), "python_version": platform.python_version()}
    yield info(catalog.BUILD_INFO, [((), facts)])
    success = [((outcome.collector,), float(outcome.success)) for outcome in outcomes]
    yield family(catalog.COLLECTOR_SUCCESS, success)
    seconds = [
        ((outcome.collector,), outcome.seconds)
        for outcome in outcomes
        if outcome.seconds is not None
    ]
    yield family(catalog.COLLECTOR_DURATION, seconds)
    yield family(
        catalog.REJECTED_SAMPLES, [((reason,), count) for reason, count in rejections.items()]
    )
