"""Measure what a fleet costs Prometheus: series, memory, rules and the dashboard Fleet.

    PYTHONPATH=tests python -m benchmarks.fleet                 # about 9 minutes
    PYTHONPATH=tests python -m benchmarks.fleet --nodes 125 --speed 1 --seconds 240  # 1,000 GPUs

Needs Prometheus on PATH. A node has 8 H100 GPUs with one rank each, rendered by the exporter's own
code. Time runs faster, and all windows of the rules are shortened by the same factor, so that each
has as many samples as with a scrape every 15 s. Other work on the machine hardly changes CPU time;
wall times are the minimum of several.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster.serve import GPUS, INTERVAL
from benchmarks.cluster.watching import Watcher, watching
from support.h100_node import h100_node, series

READS = 8
TARGETS = (1_000, 10_000)
MAX_LISTED = 6


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a fleet of one size.

    `scraped` and `recorded` are samples per interval, `cpu_seconds` is Prometheus' CPU time per
    interval, `rules` and `panels` are minimum wall seconds by name, `rules_seconds` is the sum over
    all rules, and `missed` counts evaluations that Prometheus skipped.
    """

    gpus: int
    scraped: float
    recorded: float
    head_series: float
    memory_bytes: float
    heap_bytes: float
    cpu_seconds: float
    rules_seconds: float
    rules: dict[str, float]
    panels: dict[str, float]
    down: float
    missed: float


def measure(nodes: int, speed: float, seconds: float, state: str) -> Cost:
    """Run a fleet for `seconds` and measure Prometheus during the last eighth of them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        watching(Path(folder), nodes, speed, state) as watcher,
    ):
        time.sleep(seconds * 0.875)
        return _cost(watcher, nodes * GPUS, seconds / 8)


def _cost(watcher: Watcher, gpus: int, seconds: float) -> Cost:
    before, started = watcher.own(), time.monotonic()
    rules: list[dict[str, float]] = []
    for _ in range(READS):
        time.sleep(seconds / READS)
        rules.append(watcher.rules())
    after, intervals = watcher.own(), (time.monotonic() - started) * watcher.speed / INTERVAL
    panels = [watcher.panels() for _ in range(3)]
    spent = sum(after["process_cpu_seconds_total"].values()) - sum(
        before["process_cpu_seconds_total"].values()
    )
    groups = after["prometheus_rule_group_last_evaluation_samples"]
    return Cost(
        gpus=gpus,
        scraped=watcher.value("sum(scrape_samples_scraped)"),
        recorded=sum(groups.values()),
        head_series=after["prometheus_tsdb_head_series"][""],
        memory_bytes=after["process_resident_memory_bytes"][""],
        heap_bytes=after["go_memstats_heap_inuse_bytes"][""],
        cpu_seconds=spent / intervals,
        rules_seconds=sum(_minimum(rules).values()),
        rules=_minimum(rules),
        panels=_minimum(panels),
        down=watcher.value("count(up == 0)"),
        missed=sum(after["prometheus_rule_group_iterations_missed_total"].values()),
    )


def _minimum(reads: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: min(read[name] for read in reads) for name in reads[0]}


def show_series() -> None:
    """Print the series per node, GPU and rank with default settings."""
    uuids = [f"GPU-{index}" for index in range(GPUS)]
    with h100_node([], 0) as bare, h100_node(uuids, 0) as idle, h100_node(uuids, GPUS) as busy:
        counts = [series(node.page(1.0)) for node in (bare, idle, busy)]
    per_gpu, per_rank = (counts[1] - counts[0]) / GPUS, (counts[2] - counts[1]) / GPUS
    print(f"Series: {counts[0]} per node, {per_gpu:g} per GPU, {per_rank:g} per rank\n")


def show(costs: Sequence[Cost]) -> None:
    """Print the table, the extrapolation of its rows, and the slowest rules and panels."""
    print(
        "| GPUs | samples per interval | + recorded | per second | series in the head "
        "| memory MiB | bytes per series | CPU s per interval | all rules s | slowest panel s "
        "| all panels s |"
    )
    print("|" + "---|" * 11)
    for cost in costs:
        print(_row(cost))
        if cost.down or cost.missed:
            print(
                f"<!-- {cost.down:g} targets down, {cost.missed:g} evaluations missed: "
                "too much for this machine -->"
            )
    if len(costs) > 1:
        for gpus in TARGETS:
            print(_estimate(costs, gpus))
    largest = costs[-1]
    for title, seconds in (("rules", largest.rules), ("panels", largest.panels)):
        print(f"\nSlowest {title} at {largest.gpus:,} GPUs:")
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])[:MAX_LISTED]:
            print(f"- {value * 1e3:.0f} ms {name}")


def _row(cost: Cost) -> str:
    return (
        f"| {cost.gpus:,} | {cost.scraped:,.0f} | {cost.recorded:,.0f} "
        f"| {(cost.scraped + cost.recorded) / INTERVAL:,.0f} "
        f"| {cost.head_series:,.0f} | {cost.memory_bytes / 2**20:,.0f} "
        f"| {cost.memory_bytes / cost.head_series:,.0f} "
        f"| {cost.cpu_seconds:.2f} | {cost.rules_seconds:.3f} | {max(cost.panels.values()):.3f} "
        f"| {sum(cost.panels.values()):.3f} |"
    )


def _estimate(costs: Sequence[Cost], gpus: int) -> str:
    def at(read: Callable[[Cost], float]) -> float:
        line = statistics.linear_regression(
            [cost.gpus for cost in costs], [read(cost) for cost in costs]
        )
        return line.slope * gpus + line.intercept

    samples = at(lambda cost: cost.scraped + cost.recorded)
    return (
        f"| {gpus:,} extrapolated | {at(lambda c: c.scraped):,.0f} "
        f"| {at(lambda c: c.recorded):,.0f} "
        f"| {samples / INTERVAL:,.0f} | {at(lambda c: c.head_series):,.0f} "
        f"| {at(lambda c: c.memory_bytes) / 2**20:,.0f} "
        f"| | {at(lambda c: c.cpu_seconds):.2f} | {at(lambda c: c.rules_seconds):.3f} "
        f"| {at(lambda c: max(c.panels.values())):.3f} "
        f"| {at(lambda c: sum(c.panels.values())):.3f} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument(
        "--speed", type=float, default=8, help="simulated seconds per second (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=170, help="seconds to run each size (default: %(default)s)"
    )
    parser.add_argument(
        "--state",
        choices=("healthy", "sick"),
        default="healthy",
        help="sick: every rank fires every alert",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    show_series()
    costs = [
        measure(nodes, arguments.speed, arguments.seconds, arguments.state)
        for nodes in arguments.nodes
    ]
    show(costs)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")


if __name__ == "__main__":
    main()
