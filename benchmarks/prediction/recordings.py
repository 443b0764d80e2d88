"""What Prometheus would scrape of a job every ten seconds, from virtual time, kept in files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benchmarks.prediction.jobs import EVENTS_PER_STEP, Job
from support.simulated_time import Pace, Rank

from torchmem.allocator.settings import AllocatorConfig

SCRAPE_SECONDS = 10.0
"""The interval of prometheus/prometheus.yml."""

Values = npt.NDArray[np.float64]
Labels = frozenset[tuple[str, str]]
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Recording:
    """The series of one job: a value per scrape, NaN where there is none.

    `died` is the number of the last scrape before an OutOfMemoryError ended the job, or None.
    """

    series: dict[str, dict[Labels, Values]]
    scrapes: int
    died: int | None

    @property
    def hours(self) -> float:
        """The length of the recording."""
        return self.scrapes * SCRAPE_SECONDS / 3600


def record(job: Job) -> dict[str, Values]:
    """Run a job in virtual time and return its values by series, as Prometheus writes it."""
    pace = Pace(job.seconds, 0.0, job.step_seconds / EVENTS_PER_STEP, SCRAPE_SECONDS)
    config = AllocatorConfig(expandable_segments=job.expandable_segments)
    rank = Rank(job.scenario, 0, pace, config, before_read=job.script.tell)
    rank.recorder.plan.set(job.script.largest)
    series = {name: values for name, values in rank.play().items() if "_bucket{" not in name}
    arrays = {"died": np.array([rank.scraped - 1 if rank.oom_at is not None else -1.0])}
    for name, values in series.items():
        arrays[name] = np.full(rank.scraped, np.nan)
        arrays[name][list(values)] = list(values.values())
    return arrays


def recording(job: Job, folder: Path) -> Recording:
    """Return the recording of a job; it is made if the folder lacks it."""
    file = folder / f"{job.scenario.name}.npz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".part.npz")
        np.savez_compressed(written, **record(job))  # type: ignore[arg-type]
        written.rename(file)
    with np.load(file) as arrays:
        return _recording(dict(arrays))


def _recording(arrays: dict[str, Values]) -> Recording:
    died = int(arrays.pop("died")[0])
    series: dict[str, dict[Labels, Values]] = {}
    for text, values in arrays.items():
        name, _, labels = text.partition("{")
        series.setdefault(name, {})[frozenset(_LABEL.findall(labels))] = values
    scrapes = max(len(values) for values in arrays.values())
    return Recording(series, scrapes, died if died >= 0 else None)
