"""The series of one process for its optional outputs, and one of these, a node_exporter textfile.

Imported only when a setting asks for one of them, because prometheus_client is slow to import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from torchmem.explain.threat_series import judged_families
from torchmem.explain.thresholds import Limits, defaults
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.run_directory import replace_file
from torchmem.sample.sample import Process, Sample, live_state
from torchmem.sdk.safety.cost import TEXTFILE_SECONDS


class _Process(Collector):
    def __init__(self, read: Callable[[], Sample]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        sample = self._read()
        state = sample.ended or live_state(sample, time.time())
        views = [ProcessView(sample, sample.process.pid, state, gpus={})]
        yield from families(views)
        yield from judged_families(views, _shipped_limits)

    def describe(self) -> Iterable[Metric]:
        return []  # an empty description keeps registration from collecting


def _shipped_limits(process: Process) -> Limits:
    return defaults().limits(process.run, process.hostname)


def registry(read: Callable[[], Sample]) -> CollectorRegistry:
    """Return the registry of one process, whose sample `read` returns at every collection."""
    private = CollectorRegistry(auto_describe=False)
    private.register(_Process(read))
    return private


class Textfile:
    """One .prom file, removed at a clean end so that node_exporter does not keep serving it.

    If `path` is a directory, each rank writes its own file into it.
    """

    def __init__(self, path: Path) -> None:
        self._given = path
        self._written = 0.0
        self.path: Path | None = None

    def write(self, sample: Sample) -> None:
        """Replace the file. Raises OSError."""
        path = self._path(sample.process.rank)
        replace_file(path, generate_latest(registry(lambda: sample)))
        self._written = sample.timestamp
        if path != self.path:
            self.remove()
            self.path = path

    def _path(self, rank: int) -> Path:
        is_file = self._given.suffix == ".prom"
        return self._given if is_file else self._given / f"torchmem-rank{rank}.prom"

    def refresh(self, sample: Sample) -> None:
        """Replace the file if it is older than TEXTFILE_SECONDS. Raises OSError."""
        if abs(sample.timestamp - self._written) >= TEXTFILE_SECONDS:
            self.write(sample)

    def remove(self) -> None:
        """Remove the file. Raises OSError."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
