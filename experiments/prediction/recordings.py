"""What Prometheus would scrape of a job every ten seconds, from virtual time, kept in files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from experiments.prediction.jobs import EVENTS_PER_STEP, Job, before, job
from support.simulated_time import Pace, Rank

from torchmem.allocator.settings import AllocatorConfig

SCRAPE_SECONDS = 10.0
"""The interval of prometheus/prometheus.yml."""

Values = npt.NDArray[np.float64]
Labels = frozenset[tuple[str, str]]
_LABEL = re.compile(r'(\w+)="([^"]*)"')


ENDED_SECONDS = 60.0
"""How long the end of a job is scraped at least."""
KEPT_SECONDS = 3600.0
"""How long the exporter goes on to publish a process that has ended."""
EARLIER_PID = "999"


@dataclass(frozen=True, slots=True)
class Recording:
    """The series of one job, after those of the run before it: a value per scrape, or NaN.

    `begins` is the number of the job's first scrape, and `died` that of the last one before an
    OutOfMemoryError ended it, or None.
    """

    series: dict[str, dict[Labels, Values]]
    scrapes: int
    died: int | None
    begins: int = 0

    @property
    def hours(self) -> float:
        """How long the job itself ran."""
        return (self.ends - self.begins) * SCRAPE_SECONDS / 3600

    @property
    def ends(self) -> int:
        """The number of scrapes until the end of the job."""
        return self.scrapes if self.died is None else self.died + 1


def record(made: Job) -> dict[str, Values]:
    """Run a job in virtual time and return its values by series, as Prometheus writes it."""
    event = made.step_seconds / EVENTS_PER_STEP
    pace = Pace(made.seconds, 0.0, event, SCRAPE_SECONDS, after=ENDED_SECONDS)
    config = AllocatorConfig(expandable_segments=made.expandable_segments)
    rank = Rank(made.scenario, 0, pace, config, before_read=made.script.tell)
    rank.plan.set(made.script.largest)
    series = {name: values for name, values in rank.play().items() if "_bucket{" not in name}
    died = -1.0 if rank.oom_at is None else rank.oom_at // SCRAPE_SECONDS
    arrays = {"died": np.array([died])}
    for name, values in series.items():
        arrays[name] = np.full(rank.scraped, np.nan)
        arrays[name][list(values)] = list(values.values())
    return arrays


def recording(made: Job, folder: Path) -> Recording:
    """Return the recording of a job alone; it is made if the folder lacks it."""
    file = _file(made, folder)
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".part.npz")
        np.savez_compressed(written, **record(made))  # type: ignore[arg-type]
        written.rename(file)
    with np.load(file) as arrays:
        return _recording(dict(arrays))


def record_all(jobs: Iterable[Job], folder: Path) -> None:
    """Make the recordings that the folder lacks, of jobs and those before them, on all cores."""
    wanted = [each for made in jobs for each in (made, before(made).job) if each]
    missing = {
        (each.kind, each.seed, each.is_earlier)
        for each in wanted
        if not _file(each, folder).exists()
    }
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(partial(_record, folder), sorted(missing)):
            pass


def _record(folder: Path, name: tuple[str, int, bool]) -> None:
    kind, seed, is_earlier = name
    recording(job(kind, seed, is_earlier=is_earlier), folder)


def _file(made: Job, folder: Path) -> Path:
    return folder / f"{made.scenario.name}.npz"


def _recording(arrays: dict[str, Values]) -> Recording:
    died = int(arrays.pop("died")[0])
    series: dict[str, dict[Labels, Values]] = {}
    for text, values in arrays.items():
        name, _, labels = text.partition("{")
        series.setdefault(name, {})[frozenset(_LABEL.findall(labels))] = values
    scrapes = max(len(values) for values in arrays.values())
    return Recording(series, scrapes, died if died >= 0 else None)


def with_earlier(made: Job, folder: Path) -> Recording:
    """Return the recording of a job, after that of the run before it on the same node."""
    own, earlier = recording(made, folder), before(made)
    if earlier.job is None:
        return own
    other = recording(earlier.job, folder)
    ran = round(other.scrapes * earlier.share)
    begins = ran + round(earlier.pause_seconds / SCRAPE_SECONDS)
    scrapes, names = begins + own.scrapes, _names(own)
    kept = 0 if earlier.share < 1 else round(KEPT_SECONDS / SCRAPE_SECONDS)
    series: dict[str, dict[Labels, Values]] = {}
    for name, vector in other.series.items():
        for labels, values in vector.items():
            until = np.concatenate([values[:ran], np.full(kept, values[-1])])
            placed = np.full(scrapes, np.nan)
            placed[: len(until)] = until[:scrapes]
            series.setdefault(name, {})[_renamed(labels, names)] = placed
    for name, vector in own.series.items():
        for labels, values in vector.items():
            placed = np.concatenate([np.full(begins, np.nan), values])
            series.setdefault(name, {})[labels] = placed
    died = None if own.died is None else own.died + begins
    return Recording(series, scrapes, died, begins)


def _names(recorded: Recording) -> dict[str, str]:
    """Return the labels by which the series of a job on one node are known."""
    (labels,) = recorded.series["torchmem_device_total_bytes"]
    return {**dict(labels), "pid": EARLIER_PID}


def _renamed(labels: Labels, names: Mapping[str, str]) -> Labels:
    return frozenset((label, names.get(label, value)) for label, value in labels)
