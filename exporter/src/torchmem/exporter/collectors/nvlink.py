"""NVLink: which links are up, their errors, and the bytes over all of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from torchmem.core import catalog
from torchmem.core.families import family
from torchmem.exporter.reading import Reading


def collect(reading: Reading) -> Iterator[Metric]:
    """State and errors by link, bytes by direction."""
    rows = [(gpu.labels, links) for gpu, links in reading.each(reading.nvml.nvlink)]
    up = [((*labels, str(link)), float(is_up)) for labels, links in rows for link, is_up in links.up.items()]
    yield family(catalog.NVML_NVLINK_UP, up)
    errors = [
        ((*labels, str(link), kind), count) for labels, links in rows for (link, kind), count in links.errors.items()
    ]
    yield family(catalog.NVML_NVLINK_ERRORS, errors)
    moved = [((*labels, way), count) for labels, links in rows for way, count in links.transferred.directions()]
    yield family(catalog.NVML_NVLINK_BYTES, moved)
