"""The records of a run directory, which are those that an exporter of it serves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgspec

from torchmem.capture.processes import TrainingProcess, training_processes
from torchmem.explain.headline import headline
from torchmem.explain.oom_listings import listings
from torchmem.explain.oom_report import OomReport
from torchmem.exporter.driver import PyNvml
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.host_processes import HostProcesses
from torchmem.exporter.live.state import encode, node_state
from torchmem.exporter.live.why import oom_why, rank_why
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.reading import Reading
from torchmem.exporter.sample_files import Published
from torchmem.host.gpu_indices import gpu_indices
from torchmem.host.process_table import ProcessStatus, process_state
from torchmem.mcp.answer import MAX_REPORTS
from torchmem.mcp.source import Explanation, FoundRank, OomRow, SnapshotFile
from torchmem.node.reports import load, load_all
from torchmem.sample.capture_messages import (
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
    SNAPSHOT_SUFFIX,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.launch import is_launch, owned_launch
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES
from torchmem.sample.sample import Process, decode
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted
from torchmem.top.node import ExplainedOom, NewestOom, Node, RankAnswer, converted, read
from torchmem.trace.recorded_leaks import leak_documents, leak_lines, recorded_leaks, sentence
from torchmem.why.rank import chosen_thresholds

RECORDINGS = (SNAPSHOT_SUFFIX, OOM_SNAPSHOT_SUFFIX, OOM_RECORDING_SUFFIX)


class LocalNode:
    """The ranks and reports of this user in a run directory; of root, those of all users."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.name = f"the run directory {directory}"

    def node(self) -> Node:
        """Return the state of the node. Raise UsageError if the directory cannot be read."""
        return read(encode(node_state(self._reading)))

    def why(self, found: FoundRank) -> RankAnswer:
        """Return why the memory of a rank is as it is."""
        item = self._item(found)
        device = next(each for each in item.sample.devices if (each.uuid or "") == found.gpu.uuid)
        words = rank_why(self._reading, self._directory, item, device, may_look=True)
        return converted(encode(words), RankAnswer)

    def recordings(self, found: FoundRank) -> list[SnapshotFile]:
        """Return the snapshots that lie beside the sample of a rank."""
        return list(_recordings(self._directory / self._item(found).path))

    def reports(self) -> list[OomRow]:
        """Return the OOM reports in the directory, the newest first."""
        with suppress(UsageError):
            return [_row(*each) for each in load_all(self._directory, limit=MAX_REPORTS)]
        return []

    def explain(self, file: str) -> Explanation:
        """Explain a report, with the lines that leak according to a recording beside it."""
        path = Path(file)
        report = load(path)
        leaking = recorded_leaks(path, report)
        words = oom_why(report, gpu_indices().get(report.device.uuid or ""), may_look=True)
        found = converted(encode(words), ExplainedOom)
        listed = (*listings(leak_lines(leaking)), *found.listings)
        changes = {"summary": sentence(report, leaking), "listings": listed}
        return Explanation(
            _row(path, report), msgspec.structs.replace(found, **changes), leak_documents(leaking)
        )

    def _item(self, found: FoundRank) -> Published:
        return next(each for each in self._reading.published if each.id == found.rank.id)

    @cached_property
    def _reading(self) -> NodeReading:
        """What an exporter without NVML finds, of the ranks of this user."""
        now, hosts = time.time(), HostProcesses()
        gpus = {uuid: GpuIdentity(index, uuid) for uuid, index in gpu_indices().items()}
        return NodeReading(
            now,
            Reading(PyNvml()),
            hosts.update(self._published(now)),
            gpus,
            thresholds=chosen_thresholds(None),
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


def _recordings(sample: Path) -> Iterator[SnapshotFile]:
    for suffix in RECORDINGS:
        path = sibling_path(sample, suffix)
        with suppress(OSError):
            yield SnapshotFile(str(path), path.lstat().st_mtime)


def _row(path: Path, report: OomReport) -> OomRow:
    process, launch = report.process, _launch(path, report.process)
    error = msgspec.convert(report.oom, NewestOom, from_attributes=True)
    verdict = headline(report)
    return OomRow(process.run, launch, process.rank, process.pid, error, verdict, str(path))


def _launch(report: Path, process: Process) -> str | None:
    """Return the launch in the label, which names the owner of the file."""
    with suppress(OSError):
        if is_launch(process.launch):
            return owned_launch(process.launch, report.stat().st_uid)
    return None
