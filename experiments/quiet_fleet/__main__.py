"""How often alerts fire in a healthy fleet: 416 GPUs for two weeks, and 40 faults.

    PYTHONPATH=tests python -m experiments.quiet_fleet                 # 40 minutes; then from files
    PYTHONPATH=tests python -m experiments.quiet_fleet --days 1 --nodes 13 --seed 10
    PYTHONPATH=tests python -m experiments.quiet_fleet --write         # and write what docs quote

Each process is recorded in virtual time by the project's own allocator, the SDK's recorder and the
exporter over a fake NVML. The fleet is made of these recordings, and evaluated by promtool, a day at
a time. Seeds below 20 were used to repair rules; the results are of other seeds.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from experiments.quiet_fleet.composition import DRIVER_DOWN, IDLE, Composer
from experiments.quiet_fleet.evaluation import Fired, fired, metrics_read
from experiments.quiet_fleet.fleet import GPUS, NODES, Fleet, Planner
from experiments.quiet_fleet.recordings import DAY_MINUTES, record_all

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "quiet-fleet"
RESULTS = ROOT / "experiments" / "quiet_fleet" / "results.json"
PUBLISHED_SEED = 20
WARM_UP = 120
SLOW_STEP = 120
STATIC_DAYS = 4
STATIC_WARM_UP = 26 * 60


class Part(NamedTuple):
    """What one call of promtool evaluates: some nodes from a minute on, after a warm-up."""

    name: str
    nodes: tuple[str, ...]
    first: int
    minutes: int
    warm_up: int
    slow: bool
    step: int


def parts(fleet: Fleet) -> list[Part]:
    """Return the parts of an evaluation: nodes with changing processes by day, others by four."""
    busy = {each.node for each in fleet.placed if each.run}
    changing = tuple(node for node in fleet.nodes if node in busy)
    static = tuple(node for node in fleet.nodes if node not in busy)
    found = []
    for day in range(fleet.days):
        first = day * DAY_MINUTES
        for slow, step in ((False, 60), (True, SLOW_STEP)):
            name = f"day-{day}{'-slow' * slow}"
            found.append(Part(name, changing, first, DAY_MINUTES, WARM_UP, slow, step))
    for day in range(0, fleet.days, STATIC_DAYS):
        minutes = min(STATIC_DAYS, fleet.days - day) * DAY_MINUTES
        first = day * DAY_MINUTES
        for slow in (False, True):
            name = f"static-{day}{'-slow' * slow}"
            found.append(Part(name, static, first, minutes, STATIC_WARM_UP, slow, SLOW_STEP))
    return [part for part in found if part.nodes]


def evaluated(fleet: Fleet, part: Part, recordings: Path, results: Path) -> list[Fired]:
    """Return what fired in a part; from its file, if it was evaluated before."""
    file = results / f"{part.name}.json"
    if not file.exists():
        composer = Composer(fleet, recordings, metrics_read(slow=part.slow))
        window = (part.first - part.warm_up, part.first + part.minutes)
        with TemporaryDirectory() as folder:
            found = fired(
                composer.series(part.nodes, window),
                window[1] - window[0],
                Path(folder),
                slow=part.slow,
                counted=part.minutes,
                step=part.step,
            )
        results.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([asdict(each) for each in found]))
    read = json.loads(file.read_text())
    return [
        Fired(
            each["alert"],
            each["severity"],
            tuple((name, value) for name, value in each["labels"]),
            each["starts"],
            each["first"] + part.first - part.warm_up,
        )
        for each in read
    ]


def main() -> None:
    """Record, evaluate, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=PUBLISHED_SEED)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where recordings are kept")
    parser.add_argument("--jobs", type=int, default=2, help="parts evaluated at a time")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    fleet = Planner(arguments.seed, arguments.days, arguments.nodes).plan()
    recordings = arguments.folder / "recordings"
    record_all({each.workload for each in fleet.placed} | {IDLE, DRIVER_DOWN}, recordings)
    results = arguments.folder / f"{arguments.seed}-{arguments.days}-{arguments.nodes}"
    gpu_days = len(fleet.nodes) * GPUS * fleet.days
    print(f"{len(fleet.nodes)} nodes, {gpu_days} GPU-days, {len(fleet.placed)} processes", cpu())
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(
            lambda part: evaluated(fleet, part, recordings, results), parts(fleet)
        )
        everything = [each for part in found for each in part]
    print(cpu())
    show(everything, gpu_days)


def cpu() -> str:
    """Return the CPU time so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return f"{sum(each.ru_utime + each.ru_stime for each in used):.0f} s CPU"


def show(found: list[Fired], gpu_days: int) -> None:
    """Print how often each alert fired."""
    by_alert: dict[tuple[str, str], list[Fired]] = defaultdict(list)
    for each in found:
        by_alert[each.severity, each.alert].append(each)
    for (severity, alert), those in sorted(by_alert.items()):
        starts = sum(each.starts for each in those)
        groups = len({(each.where, each.first // 60) for each in those})
        print(f"{severity:9}{alert:34}{starts:5} {groups:5} {100 * groups / gpu_days:.2f}")
        for each in those[:6]:
            print(f"    {each.first // DAY_MINUTES}d{each.first % DAY_MINUTES // 60:02}h", each.labels)


if __name__ == "__main__":
    main()
