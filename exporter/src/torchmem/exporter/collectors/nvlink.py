"""NVLink: which links are up, their errors, and the bytes over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from torchmem.exporter.reading import Reading
from torchmem.exporter.values import NvLink
from torchmem.sample import catalog
from torchmem.sample.families import family


def collect(reading: Reading) -> Iterator[Metric]:
    """State by link. Errors by kind and bytes by direction over all links: the errors of each would be 72 series."""
    rows = [(gpu.labels, links) for gpu, links in reading.each(reading.nvml.nvlink)]
    up = [
        ((*labels, str(link)), float(is_up))
        for labels, links in rows
        for link, is_up in links.up.items()
    ]
    yield family(catalog.NVML_NVLINK_UP, up)
    errors = [
        ((*labels, kind), count)
        for labels, links in rows
        for kind, count in _by_kind(links).items()
    ]
    yield family(catalog.NVML_NVLINK_ERRORS, errors)
    moved = [
        ((*labels, way), count)
        for labels, links in rows
        for way, count in links.transferred.directions()
    ]
    yield family(catalog.NVML_NVLINK_BYTES, moved)


def _by_kind(links: NvLink) -> Mapping[str, int]:
    total = Counter[str]()
    for (_, kind), count in links.errors.items():
        total[kind] += count
    return total
