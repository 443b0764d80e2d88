"""What one collection has found on a node, for pages and for programs other than Prometheus."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.reading import Reading
from torchmem.node.published import NodeRanks


@dataclass(frozen=True, slots=True)
class NodeReading(NodeRanks):
    """The ranks of a node, and what NVML tells of its GPUs.

    `identities`: every GPU that was ever identified, also those that do not respond now.
    """

    reading: Reading = field(kw_only=True)
    identities: Collection[GpuIdentity] = ()
