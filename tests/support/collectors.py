"""A collector without GPUs and ranks; tests override what they serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client.core import Metric

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.reading import Reading
from torchmem.node.published import Published


class EmptyCollector:
    """A `Collector` that finds nothing."""

    run_dir = Path("/nonexistent")

    def collect(self) -> Sequence[Metric]:
        """Return no families."""
        return []

    def known(self) -> Sequence[Metric]:
        """Return no families."""
        return []

    def found(self) -> NodeReading:
        """Return that nothing is known."""
        return NodeReading(0.0, reading=Reading(FakeNvml.of()))

    def published(self) -> Sequence[Published]:
        """Return no process."""
        return []
