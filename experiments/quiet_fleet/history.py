"""What runs that finished in the last two days left of the GPU, for later runs of their names.

The rules compare a prediction with it. Each call of promtool sees a day, so it is a series here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from experiments.quiet_fleet.composition import Window, notation, read_only, renamed
from experiments.quiet_fleet.evaluation import HISTORY, SAMPLE, answers, groups_for, metrics_read
from experiments.quiet_fleet.fleet import Fleet, Placed
from experiments.quiet_fleet.recordings import DAY_MINUTES, Workload, recorded

KEPT_MINUTES = 2 * DAY_MINUTES
MARGIN = "rank:torchmem_peak_margin_bytes:ratio"
_HOURS = 10
_RUN = re.compile(r'run="([^"]*)"')


def margins(workloads: Iterable[Workload], recordings: Path) -> Mapping[Workload, float]:
    """Return the least share of the GPU that each workload leaves at the peak of its steps."""
    chosen = {str(number): each for number, each in enumerate(sorted(workloads))}
    query = f"min by (run) (min_over_time({MARGIN}[{_HOURS}h]))"
    with TemporaryDirectory() as folder:
        series = (one for run, each in chosen.items() for one in _alone(run, each, recordings))
        groups = groups_for([{"record": MARGIN, "expr": MARGIN}])
        output = answers(series, groups, [(query, _HOURS * 60 - 1)], Path(folder), 60)
    found = SAMPLE.findall(output.partition("got:")[2])
    return {chosen[_RUN.findall(labels)[0]]: float(value) for labels, value in found}


def _alone(run: str, workload: Workload, recordings: Path) -> Iterator[tuple[str, str]]:
    """Yield the series of a workload as a run on a node of its own."""
    placed = Placed(workload, f"node{run}", 0, 0, 0, run, f"1000-{run}", 0, 1)
    for name, values in read_only(recorded(workload, recordings), metrics_read()).series.items():
        yield renamed(name, placed.node, 0, placed), notation(values)


class History:
    """The series of a fleet; `least` is what workloads leave."""

    def __init__(self, fleet: Fleet, recordings: Path) -> None:
        finished = [each for each in fleet.placed if each.run and each.workload.ends == "exited"]
        known = {each.workload: recorded(each.workload, recordings) for each in finished}
        healthy = {each for each, found in known.items() if not found.ran_out_of_memory}
        least = margins(healthy, recordings)
        self._ended: dict[tuple[str, str, int], list[tuple[int, float]]] = defaultdict(list)
        for each in finished:
            if each.workload in least:
                end = each.start + known[each.workload].minutes(each.loops)
                labels = each.run, each.launch.partition("-")[0], each.rank
                self._ended[labels].append((end, least[each.workload]))

    def series(self, window: Window, step: int) -> Iterator[tuple[str, str]]:
        """Yield each run and rank's series in some minutes, in promtool's notation."""
        first, end = window
        for (run, user, rank), ended in self._ended.items():
            values = np.full(end - first, np.nan)
            for at, margin in ended:
                part = slice(max(0, at - first), max(0, at + KEPT_MINUTES - first))
                values[part] = np.fmin(values[part], margin)
            if not np.isnan(values).all():
                labels = f'job="torchmem",run="{run}",uid="{user}",rank="{rank}"'
                yield f"{HISTORY}{{{labels}}}", notation(values, step)
