"""Fans."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.sample import catalog
from torchmem.sample.families import family, known


def collect(reading: Reading) -> Iterator[Metric]:
    """Speed of every fan as a share of its highest; nothing for a card without fans."""
    fans = reading.each(reading.nvml.fans)
    rows = (
        ((*gpu.labels, str(fan)), speed) for gpu, speeds in fans for fan, speed in enumerate(speeds)
    )
    yield family(catalog.NVML_FAN_SPEED, known(rows))
