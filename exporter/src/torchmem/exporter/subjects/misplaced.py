"""Memory of ranks on GPUs that are those of other ranks, as series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from torchmem.exporter.gpus import GpuIdentity
from torchmem.metrics import catalog
from torchmem.metrics.families import family
from torchmem.node.misplaced import misplaced
from torchmem.node.published import NodeRanks


def misplaced_families(found: NodeRanks, gpus: Mapping[str, GpuIdentity]) -> Iterator[Metric]:
    """Yield what each rank holds on GPUs that are not its own; `gpus`: by UUID, with MIG's."""
    rows = [
        ((str(gpus[row.uuid].index), row.uuid, *row.item.view({}).labels), row.bytes)
        for row in misplaced(found)
        if row.uuid in gpus
    ]
    yield family(catalog.MISPLACED, rows)
