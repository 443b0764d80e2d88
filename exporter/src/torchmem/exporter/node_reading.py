"""What one collection has found on a node, for pages and for programs other than Prometheus."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmem.explain.thresholds import Limits, Thresholds, defaults
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.host_processes import KillCause
from torchmem.exporter.reading import Reading
from torchmem.exporter.sample_files import Published
from torchmem.exporter.subjects.outside_allocator import DeviceProcess
from torchmem.host.process_table import ProcessKey


@dataclass(frozen=True, slots=True)
class NodeReading:
    """What one collection has found on the node: its GPUs, its ranks, and what joins them.

    `time`: when it ended, in Unix seconds. `gpus`: the known GPUs by UUID, and those of MIG devices
    by the names of these devices. `outside`: bytes outside the allocator by device and process;
    below zero, that many reserved bytes are not on the device. `kill_causes`: what killed a
    process, where it is known. `thresholds` were in force. `run_dir`: where the ranks were found.
    `lacks_descriptors`: whether ranks are missing because no file descriptor was left.
    """

    time: float
    reading: Reading
    published: Sequence[Published] = ()
    gpus: Mapping[str, GpuIdentity] = field(default_factory=dict)
    outside: Mapping[DeviceProcess, int] = field(default_factory=dict)
    kill_causes: Mapping[ProcessKey, KillCause] = field(default_factory=dict)
    thresholds: Thresholds = field(default_factory=defaults)
    run_dir: Path | None = None
    lacks_descriptors: bool = False

    def limits(self, item: Published) -> Limits:
        """Return the thresholds for a process."""
        return self.thresholds.limits(item.sample.process.run, platform.node())
