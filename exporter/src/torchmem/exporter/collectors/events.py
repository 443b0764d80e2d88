"""XID errors and other events of GPUs, counted since the exporter started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.watch import Watch
from torchmem.sample import catalog
from torchmem.sample.families import family


def collect(watch: Watch, known: Mapping[str, GpuIdentity]) -> Iterator[Metric]:
    """Of every GPU that was ever watched, also of one that is lost now."""
    tallies = [
        (known[uuid].labels, tally) for uuid, tally in watch.tallies().items() if uuid in known
    ]
    xids = [
        ((*labels, str(xid)), count)
        for labels, tally in tallies
        for xid, count in tally.xids.items()
    ]
    yield family(catalog.NVML_XID_ERRORS, xids)
    last = [
        ((*labels, str(xid)), when)
        for labels, tally in tallies
        for xid, when in tally.xid_times.items()
    ]
    yield family(catalog.NVML_XID_LAST, last)
    events = [
        ((*labels, name), count)
        for labels, tally in tallies
        for name, count in tally.events.items()
    ]
    yield family(catalog.NVML_EVENTS, events)
