"""Run a fleet of 10,000 GPUs: sharded scraping, remote write, one store, and the rules in it.

    PYTHONPATH=tests python -m benchmarks.scale --gpus 10000              # about 20 minutes
    PYTHONPATH=tests python -m benchmarks.scale --gpus 1000 2000 4000     # and the line to 100,000

Needs Debian's package victoria-metrics, and no GPU. The exporters are simulated, as for
benchmarks.fleet. Two vmagents scrape half of them each and write to one VictoriaMetrics, first
without rules; then vmalert evaluates all rules in it, those across ranks too. After that, nothing
is scraped: the store gets the hour that rules and panels look back at, and each group of rules and
each panel is asked for alone.

The interval is as long as this machine needs; windows are longer by the same factor, so that each
has as many samples as with a scrape every 15 s. What counts is CPU time: it hardly depends on the
interval, and other work on the machine changes it less than wall time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from benchmarks.cluster.past import fill
from benchmarks.cluster.serve import GPUS, INTERVAL
from benchmarks.cluster.store import AGENTS, RULER, STORE, StoredFleet
from benchmarks.cluster.watching import RULES, Watcher, exporters, seconds, shortened
from support.dashboards import BOARDS
from support.stack import answers
from support.waiting import until

TARGETS = (10_000, 100_000)
HOUR_POINTS = 240
REPEATS = 3
MAX_LISTED = 12
# Seconds between two scrapes of a GPU that two busy cores can keep up with.
SECONDS_PER_GPU = 0.015
# What a viewer selects: a run of 32 ranks, or a node.
BOARDS_SHOWN: Mapping[str, Mapping[str, str]] = {
    "fleet": {},
    "training-memory": {"run": "train-0-.*"},
    "node": {"node": "node-0"},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The shortest time that a query took, and the CPU time that it cost the store, in seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a fleet.

    CPU seconds by program for one interval of scrapes alone, and of scrapes and rules; resident
    bytes. `counted` is what cluster:nvml_gpus:count says, `series` are in the store, `samples` in a
    scrape, `past` were imported. `groups` are groups of rules with their interval (s), for one
    evaluation; `panels` by dashboard and title.
    """

    gpus: int
    counted: float
    series: float
    samples: float
    past: int
    load: float
    scraping: Mapping[str, float]
    all: Mapping[str, float]
    memory: Mapping[str, int]
    groups: Mapping[str, tuple[float, Answer]]
    panels: Mapping[str, Answer]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[10_000])
    parser.add_argument("--interval", type=int, help="seconds between two scrapes")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the store of the last fleet in a new folder"
    )
    arguments = parser.parse_args()
    costs = []
    for gpus in arguments.gpus:
        interval = arguments.interval or max(int(INTERVAL), round(gpus * SECONDS_PER_GPU))
        with tempfile.TemporaryDirectory() as temporary:
            costs.append(_cost(Path(temporary), gpus // GPUS, interval))
            if arguments.keep and gpus == arguments.gpus[-1]:
                shutil.copytree(Path(temporary) / "store", arguments.keep)
        _show(costs[-1])
    if len(costs) > 1:
        _line(costs)


def _cost(folder: Path, nodes: int, interval: int) -> Cost:
    with ExitStack() as stack:
        server = stack.enter_context(exporters(folder, INTERVAL / interval, "healthy"))
        fleet = StoredFleet(folder, server, nodes, interval, stack)
        fleet.start_store()
        fleet.start_agents()
        # Series are new in the first interval, and the indexes in the second.
        time.sleep(2 * interval)
        scraping = _spent(fleet)
        fleet.start_rules()
        # Groups start within the first interval; rules read each other in the second.
        time.sleep(2 * interval)
        everything, memory = _spent(fleet), fleet.memory()
        at = time.time() - 2
        fleet.stop(AGENTS)
        fleet.stop(RULER)
        # What vmalert has asked for last is still being answered.
        until(lambda: answers(f"{fleet.url}/api/v1/query?query=1"), 10 * interval, pause=5.0)
        watcher = Watcher(fleet.url, INTERVAL / interval, at)
        return Cost(
            nodes * GPUS,
            watcher.value("cluster:nvml_gpus:count"),
            watcher.own()["vm_cache_entries"]['{type="storage/hour_metric_ids"}'],
            watcher.value("sum(scrape_samples_scraped)"),
            fill(watcher, at, interval, HOUR_POINTS),
            os.getloadavg()[0],
            scraping,
            everything,
            memory,
            dict(_groups(watcher, fleet)),
            dict(_panels(watcher, fleet)),
        )


def _spent(fleet: StoredFleet) -> dict[str, float]:
    """Return CPU seconds by program in the next interval."""
    before = fleet.cpu()
    time.sleep(fleet.interval)
    return {name: used - before[name] for name, used in fleet.cpu().items()}


def _groups(watcher: Watcher, fleet: StoredFleet) -> Iterator[tuple[str, tuple[float, Answer]]]:
    """Yield each group of rules, its interval (s), and what one evaluation takes."""
    for path in sorted(RULES.glob("*.yml")):
        text = path.read_text()
        intervals = {
            group["name"]: seconds(group.get("interval", f"{INTERVAL:.0f}s"))
            for group in yaml.safe_load(text)["groups"]
        }
        for group in yaml.safe_load(shortened(text, watcher.speed))["groups"]:
            asked = partial(_evaluate, watcher, [rule["expr"] for rule in group["rules"]])
            yield group["name"], (intervals[group["name"]], _answer(fleet, asked))


def _evaluate(watcher: Watcher, expressions: Sequence[str]) -> float:
    started = time.perf_counter()
    for expression in expressions:
        watcher.fetch("query", query=expression, time=watcher.at)
    return time.perf_counter() - started


def _panels(watcher: Watcher, fleet: StoredFleet) -> Iterator[tuple[str, Answer]]:
    for board, variables in BOARDS_SHOWN.items():
        for title, asked in watcher.panel_queries(board, **variables):
            yield f"{board}: {title}", _answer(fleet, asked)


def _answer(fleet: StoredFleet, asked: Callable[[], float]) -> Answer:
    walls, spent = [], []
    for _ in range(REPEATS):
        before = fleet.cpu()[STORE]
        walls.append(asked())
        spent.append(fleet.cpu()[STORE] - before)
    return Answer(min(walls), min(spent))


def _show(cost: Cost) -> None:
    print(
        f"\n{cost.gpus:,} GPUs, {cost.counted:,.0f} in cluster:nvml_gpus:count, "
        f"{cost.samples:,.0f} samples per scrape, {cost.series:,.0f} series, "
        f"{cost.past:,} samples imported; {os.cpu_count()} cores, load {cost.load:.1f}"
    )
    print("| program | CPU s per interval, scrapes alone | with all rules | resident MiB |")
    print("|---|---|---|---|")
    for name, used in cost.all.items():
        alone = f"{cost.scraping[name]:.1f}" if name in cost.scraping else ""
        print(f"| {name} | {alone} | {used:.1f} | {cost.memory[name] / 2**20:,.0f} |")
    print("\n| group of rules | interval s | CPU s per evaluation | wall s |\n|---|---|---|---|")
    for name, (interval, answer) in sorted(cost.groups.items(), key=lambda item: -item[1][1].cpu):
        print(f"| {name} | {interval:g} | {answer.cpu:.2f} | {answer.wall:.2f} |")
    print(f"\nAll groups: {_rules(cost):.1f} CPU s per {INTERVAL:g} s")
    print("\n| panel | first screen | wall s | CPU s of the store |\n|---|---|---|---|")
    by_time = sorted(cost.panels.items(), key=lambda item: -item[1].wall)
    first = [panel for panel in by_time if _is_first(panel[0])]
    for name, answer in first + [panel for panel in by_time if panel not in first][:MAX_LISTED]:
        screen = "yes" if _is_first(name) else ""
        print(f"| {name} | {screen} | {answer.wall:.2f} | {answer.cpu:.2f} |", flush=True)


def _rules(cost: Cost) -> float:
    """Return the CPU seconds of the store for all groups in one interval."""
    return sum(answer.cpu * INTERVAL / interval for interval, answer in cost.groups.values())


def _is_first(name: str) -> bool:
    """Return whether a panel is on the part of Fleet that is open at first."""
    board, _, title = name.partition(": ")
    return board == "fleet" and title in {panel["title"] for panel in BOARDS[board]["panels"]}


def _line(costs: Sequence[Cost]) -> None:
    """Print what the least-squares line through the measured sizes says about larger ones."""
    read: dict[str, Callable[[Cost], float]] = {
        "store, scrapes": lambda cost: cost.scraping[STORE],
        "store, rules": _rules,
        "agents": lambda cost: cost.scraping[AGENTS],
        "ruler": lambda cost: cost.all[RULER],
        "store MiB": lambda cost: cost.memory[STORE] / 2**20,
    }
    print("\n| GPUs, on the line | " + " | ".join(read) + " |\n|" + "---|" * (1 + len(read)))
    for gpus in TARGETS:
        cells = []
        for value in read.values():
            line = statistics.linear_regression(
                [cost.gpus for cost in costs], [value(cost) for cost in costs]
            )
            cells.append(f"{line.slope * gpus + line.intercept:,.1f}")
        print(f"| {gpus:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
