"""The ranks of a run directory in the records of a node, without an exporter.

They are those of this user; root has those of all users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torchmem.explain.thresholds import Thresholds
from torchmem.host.process_table import ProcessStatus, process_state
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.host_processes import HostProcesses
from torchmem.node.node_state import NvmlValues, node_state
from torchmem.node.published import NodeRanks, Published
from torchmem.node.ranks import TrainingProcess, training_processes
from torchmem.node.state import NodeState, RankWhy
from torchmem.node.why import rank_why
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES
from torchmem.sample.sample import decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted


class LocalRanks:
    """The ranks at the time of the first question, judged by these thresholds."""

    def __init__(self, directory: Path, thresholds: Thresholds) -> None:
        self._directory, self._thresholds = directory, thresholds

    def node(self) -> NodeState:
        """Return the state of the node. Raise UsageError if the directory cannot be read."""
        return node_state(self.found, NvmlValues())

    def why(self, gpu: str, id_: str) -> RankWhy | None:
        """Return the explanation of a rank's memory on a GPU; None if there is no such rank."""
        item = self.item(id_)
        device = item and item.device(gpu)
        return rank_why(self.found, item, device, may_look=True) if item and device else None

    def item(self, id_: str) -> Published | None:
        """Return the process of a rank."""
        return next((each for each in self.found.published if each.id == id_), None)

    def path(self, item: Published) -> Path:
        """Return the file of a sample."""
        return self._directory / item.path

    @cached_property
    def found(self) -> NodeRanks:
        """The processes. Raise UsageError if the directory cannot be read."""
        now, problems = time.time(), list[str]()
        # The sample has the host memory of its last write; /proc has that of now.
        published = HostProcesses().update(self._published(now, problems))
        return NodeRanks(
            now,
            published,
            gpu_indices(),
            thresholds=self._thresholds,
            run_dir=self._directory,
            missing=" ".join(problems[:1]) or None,
        )

    def _published(self, now: float, problems: list[str]) -> Iterator[Published]:
        """Yield the processes; add what is wrong with the samples of others."""
        for process in training_processes(self._directory):
            item = self._publication(process, now)
            if isinstance(item, Published):
                yield item
            else:
                problems.append(item)

    def _publication(self, process: TrainingProcess, now: float) -> Published | str:
        """Return a process with its sample, or why the sample cannot be used."""
        try:
            data, _ = read_untrusted(process.sample, MAX_SAMPLE_BYTES, process.uid)
            # The identity that was checked against /proc: the file may have changed since.
            sample = replace(decode(data), process=process.process)
        except FileNotFoundError:
            return f"{process} has ended."
        except UntrustedFileError as error:
            return f"The sample of {process} {error}."
        except (ValueError, RecursionError):
            return f"The sample of {process} is not valid: use the torchmem version of its process."
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
