"""How often alerts fire in a healthy fleet: 416 GPUs for two weeks, and 40 faults.

    PYTHONPATH=tests python -m experiments.quiet_fleet                 # an hour; then from files
    PYTHONPATH=tests python -m experiments.quiet_fleet --days 1 --nodes 13 --seed 10
    PYTHONPATH=tests python -m experiments.quiet_fleet --write         # and write what docs quote

Each process is recorded in virtual time by the project's own allocator, the SDK's recorder and the
exporter over a fake NVML. The fleet is made of these recordings, and evaluated by promtool, a day
at a time. Seeds up to 22 were used to repair rules; the results are of other seeds.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from experiments.quiet_fleet.composition import DRIVER_DOWN, IDLE, Composer
from experiments.quiet_fleet.evaluation import Fired, fired, metrics_read
from experiments.quiet_fleet.faults import Told, told_faults
from experiments.quiet_fleet.fleet import GPUS, NODES, Fleet, Planner
from experiments.quiet_fleet.history import History
from experiments.quiet_fleet.recordings import DAY_MINUTES, record_all, recorded

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "quiet-fleet"
RESULTS = ROOT / "experiments" / "quiet_fleet" / "results.json"
PUBLISHED_SEED = 23
WARM_UP = 120
"""Minutes before a day: rules read back 95 minutes at most, but for `history` and an idle server.
"""
STEP, STATIC_STEP = 120, 300
"""Seconds between evaluations: of nodes whose processes change, and of others."""
FINE_STEP = 60
"""Of nodes on which a warning fired at the coarser step, which are evaluated again."""
STATIC_DAYS = 7
STATIC_WARM_UP = 26 * 60
"""An idle server is told after a day."""


class Part(NamedTuple):
    """What one call of promtool evaluates: some nodes from a minute on, after a warm-up."""

    name: str
    nodes: tuple[str, ...]
    first: int
    minutes: int
    warm_up: int
    step: int


def parts(fleet: Fleet, days: int) -> list[Part]:
    """Return the parts of the first days: nodes with changing processes by day, others by week."""
    busy = {each.node for each in fleet.placed if each.run}
    changing = tuple(node for node in fleet.nodes if node in busy)
    static = tuple(node for node in fleet.nodes if node not in busy)
    found = []
    for day in range(days):
        first = day * DAY_MINUTES
        found.append(Part(f"day-{day}", changing, first, DAY_MINUTES, WARM_UP, STEP))
    for day in range(0, days, STATIC_DAYS):
        length = min(STATIC_DAYS, days - day)
        first, minutes, name = day * DAY_MINUTES, length * DAY_MINUTES, f"static-{day}-{length}"
        found.append(Part(name, static, first, minutes, STATIC_WARM_UP, STATIC_STEP))
    return [part for part in found if part.nodes]


def promtool(
    composer: Composer, history: History, part: Part, nodes: tuple[str, ...], step: int
) -> list[Fired]:
    """Return what fires on some nodes in a part, evaluated every `step` seconds."""
    window = (part.first - part.warm_up, part.first + part.minutes)
    with TemporaryDirectory() as folder:
        return fired(
            chain(composer.series(nodes, window, step // 60), history.series(window, step // 60)),
            window[1] - window[0],
            Path(folder),
            counted=part.minutes,
            step=step,
        )


def evaluated(
    fleet: Fleet, history: History, part: Part, recordings: Path, results: Path
) -> list[Fired]:
    """Return what fired in a part; from its file, if it was evaluated before."""
    file = results / f"{part.name}.json"
    if not file.exists():
        composer = Composer(fleet, recordings, metrics_read())
        found = promtool(composer, history, part, part.nodes, part.step)
        # Conditions that come and go each minute look as if they lasted.
        coarse = {each for each in found if each.severity != "info" and each.node}
        nodes = {each.node for each in coarse}
        found = [each for each in found if each not in coarse]
        if nodes:
            fine = promtool(composer, history, part, tuple(sorted(nodes)), FINE_STEP)
            found += [each for each in fine if each.severity != "info"]
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


def told_by_file(seed: int, file: Path) -> list[Told]:
    """Return how the faults were told; from a file, if they were played before."""
    if not file.exists():
        with TemporaryDirectory() as folder:
            found = told_faults(seed, Path(folder))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([asdict(each) for each in found]))
    return [Told(**each) for each in json.loads(file.read_text())]


def cpu() -> float:
    """Return the CPU time so far, in minutes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) / 60


def unhealthy(fleet: Fleet, recordings: Path) -> set[str]:
    """Return the launches of jobs that do not fit into memory, which are not part of the fleet."""
    drawn = {each.workload for each in fleet.placed if each.run}
    died = {each for each in drawn if recorded(each, recordings).ran_out_of_memory}
    return {each.launch for each in fleet.placed if each.workload in died}


def messages(those: list[Fired]) -> int:
    """Return the messages of an alert: one for all that begins within an hour in one place."""
    starts: dict[tuple[str, int], int] = {}
    for each in those:
        key = each.where, each.first // 60
        starts[key] = max(each.starts, starts.get(key, 0))
    return sum(starts.values())


def by_alert(fleet: Fleet, found: list[Fired]) -> list[dict[str, object]]:
    """Return how often each alert fired, in how many messages, and by what kind of job.

    As Alertmanager is configured, a message is for all ranks of a launch, or for a node.
    """
    kinds = {each.launch: each.workload.kind for each in fleet.placed}
    grouped: dict[tuple[str, str], list[Fired]] = defaultdict(list)
    for each in found:
        grouped[each.severity, each.alert].append(each)
    return [
        {
            "alert": alert,
            "severity": severity,
            "alerts": sum(each.starts for each in those),
            "messages": messages(those),
            "jobs": Counter(kinds.get(dict(each.labels).get("launch", ""), "") for each in those),
        }
        for (severity, alert), those in sorted(grouped.items())
    ]


def show(results: dict[str, Any], found: list[Fired], faults: list[Told]) -> None:
    """Print the results, and where alerts fired."""
    days = results["gpu_days"]
    print(f"{results['gpus']} GPUs, {days} GPU-days; {cpu():.0f} CPU minutes")
    for each in results["alerts"]:
        rate = 100 * each["messages"] / days
        print(each["severity"], each["alert"], each["alerts"], each["messages"], f"{rate:.2f}")
        for one in [one for one in found if one.alert == each["alert"]][:4]:
            day, minute = divmod(one.first, DAY_MINUTES)
            print(f"    {day} {minute // 60:02}:{minute % 60:02}", dict(one.labels))
    for told in faults:
        print("in time" if told.in_time else "LATE   ", told)


def main() -> None:
    """Record, evaluate, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=PUBLISHED_SEED)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--first", type=int, help="evaluate only the first of these days")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where recordings are kept")
    parser.add_argument("--jobs", type=int, default=2, help="parts evaluated at a time")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    fleet = Planner(arguments.seed, arguments.days, arguments.nodes).plan()
    days, recordings = arguments.first or fleet.days, arguments.folder / "recordings"
    folder = arguments.folder / f"{arguments.seed}-{arguments.days}-{arguments.nodes}"
    record_all({each.workload for each in fleet.placed} | {IDLE, DRIVER_DOWN}, recordings)
    history = History(fleet, recordings)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        answers = pool.map(
            lambda part: evaluated(fleet, history, part, recordings, folder), parts(fleet, days)
        )
        found = [each for part in answers for each in part]
    left_out = unhealthy(fleet, recordings)
    found = [each for each in found if dict(each.labels).get("launch") not in left_out]
    faults = [] if arguments.no_faults else told_by_file(arguments.seed, folder / "faults.json")
    results = {
        "command": f"PYTHONPATH=tests python -m experiments.quiet_fleet --first {days} --write",
        "seed": arguments.seed,
        "days": days,
        "nodes": len(fleet.nodes),
        "gpus": len(fleet.nodes) * GPUS,
        "gpu_days": len(fleet.nodes) * GPUS * days,
        "ranks": sum(
            bool(each.run and each.start < days * DAY_MINUTES and each.launch not in left_out)
            for each in fleet.placed
        ),
        "alerts": by_alert(fleet, found),
        "faults": [asdict(each) | {"in_time": each.in_time} for each in faults],
    }
    show(results, found, faults)
    if arguments.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
