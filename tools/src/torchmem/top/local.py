"""The ranks of a run directory in the records that an exporter without NVML serves.

They are those of this user; root has those of all users.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torchmem.explain.thresholds import THRESHOLDS_VARIABLE, defaults
from torchmem.exporter.driver import PyNvml
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.host_processes import HostProcesses
from torchmem.exporter.live.state import node_state
from torchmem.exporter.live.why import rank_why
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.reading import Reading
from torchmem.exporter.sample_files import Published
from torchmem.exporter.thresholds import load
from torchmem.host.process_table import ProcessStatus, process_state
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.ranks import TrainingProcess, training_processes
from torchmem.node.state import NodeState, NvmlState, RankWhy
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES
from torchmem.sample.sample import decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted


class LocalRanks:
    """The ranks at the time of the first question."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def node(self) -> NodeState:
        """Return the state of the node. Raise UsageError if the directory cannot be read."""
        return replace(node_state(self._found), nvml=NvmlState())  # which was not asked

    def why(self, gpu: str, id_: str) -> RankWhy | None:
        """Return why the memory of a rank is as it is; None if there is no such rank."""
        item = self._item(id_)
        devices = item.sample.devices if item else ()
        device = next((each for each in devices if gpu == (each.uuid or "")), None)
        if item is None or device is None:
            return None
        return rank_why(self._found, self._directory, item, device, may_look=True)

    def sample_file(self, id_: str) -> Path | None:
        """Return the file of a rank's sample."""
        item = self._item(id_)
        return self._directory / item.path if item else None

    def _item(self, id_: str) -> Published | None:
        return next((each for each in self._found.published if each.id == id_), None)

    @cached_property
    def _found(self) -> NodeReading:
        now, hosts = time.time(), HostProcesses()
        file = os.environ.get(THRESHOLDS_VARIABLE)
        return NodeReading(
            now,
            Reading(PyNvml()),
            hosts.update(self._published(now)),
            {uuid: GpuIdentity(index, uuid) for uuid, index in gpu_indices().items()},
            thresholds=load(Path(file)) if file else defaults(),
            run_dir=self._directory,
        )

    def _published(self, now: float) -> Iterator[Published]:
        for process in training_processes(self._directory):
            with suppress(UntrustedFileError, OSError, ValueError, RecursionError):
                yield self._publication(process, now)

    def _publication(self, process: TrainingProcess, now: float) -> Published:
        data, _ = read_untrusted(process.sample, MAX_SAMPLE_BYTES, process.uid)
        sample = replace(decode(data), process=process.process)
        status = ProcessStatus(process.alive, process.pid)
        silent_seconds = now - min(sample.timestamp, process.written_ns / 1e9)
        return Published(
            sample,
            process.pid,
            process_state(sample, status, now, silent_seconds),
            attributed=bool(process.alive),
            uid=process.uid,
            path=str(process.sample.relative_to(self._directory)),
        )
