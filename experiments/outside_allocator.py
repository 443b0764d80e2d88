"""Measure how often the memory outside the allocator is right in the demo's scenarios.

    python -m experiments.outside_allocator                        # about 6 minutes
    python -m experiments.outside_allocator --scenarios rl-phases retry-storm --interval 1
    python -m experiments.outside_allocator --start                # the value at the start instead

A process of the demo has exactly one thing outside its allocator, the CUDA context, whose size the
simulator knows. A reading is right within 10% of it. Ranks are the demo's own processes, with the
real SDK; the exporter runs in this process and reads NVML and the run directory as in the demo.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchmem.demo.ranks import DemoPlan, RankProcesses
from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory
from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.simulator.gpu import CONTEXT_BYTES
from torchmem.simulator.scenarios import SCENARIOS

TOLERANCE = 0.1
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Readings:
    """What the exporter reported for one scenario: bytes, and running ranks without a value."""

    name: str
    values: Sequence[float]
    absent: int

    @property
    def right(self) -> int:
        """How many values are within TOLERANCE of the context."""
        return sum(abs(value - CONTEXT_BYTES) <= TOLERANCE * CONTEXT_BYTES for value in self.values)

    @property
    def worst(self) -> float:
        """The largest difference from the context, in bytes."""
        return max((abs(value - CONTEXT_BYTES) for value in self.values), default=0.0)


def measure(name: str, seconds: float, interval: float, ranks: int, metric: MetricSpec) -> Readings:
    """Run one scenario and read the exporter before it and every `interval` seconds."""
    plan = DemoPlan(scenario=name, ranks=ranks, duration=seconds, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        processes = RankProcesses(plan, Path(folder))
        directory = RunDirectory(Path(folder) / "run")
        exporter = Exporter(processes.gpus.nvml(), directory)
        with closing(exporter), closing(processes):
            exporter.collect()
            processes.start()
            readings = list(_readings(processes, exporter, seconds, interval, metric))
    values = [value for read, _ in readings for value in read]
    return Readings(name, values, sum(running - len(read) for read, running in readings))


def _readings(
    processes: RankProcesses,
    exporter: Exporter,
    seconds: float,
    interval: float,
    metric: MetricSpec,
) -> Iterator[tuple[list[float], int]]:
    """Yield the values of each scrape, and the number of ranks that ran."""
    started = time.monotonic()
    while time.monotonic() < started + seconds and processes.alive():
        time.sleep(interval)
        families = {family.name: family.samples for family in exporter.collect()}
        running = [
            sample
            for sample in families[catalog.PROCESS_STATE.name]
            if sample.labels["state"] in {"running", "stalled"} and sample.value
        ]
        values = [sample.value for sample in families[metric.name]]
        yield values, len(running)


def show(readings: Sequence[Readings]) -> None:
    """Print one row for each scenario, and their sum."""
    print("| scenario | readings | right within 10% | largest error MiB | without a value |")
    print("|---|---|---|---|---|")
    everything = Readings(
        "all",
        [value for reading in readings for value in reading.values],
        sum(reading.absent for reading in readings),
    )
    for row in (*readings, everything):
        count = len(row.values)
        share = f"{row.right} ({row.right / count:.1%})" if count else "0"
        print(f"| {row.name} | {count} | {share} | {row.worst / MIB:,.0f} | {row.absent} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    add("--seconds", type=float, default=90, help="length of a scenario (default: %(default)s)")
    add("--interval", type=float, default=5, help="between scrapes (default: %(default)s)")
    add("--ranks", type=int, default=2, help="of each scenario (default: %(default)s)")
    add("--start", action="store_true", help="read the value at the start instead")
    add("--at-once", type=int, default=4, help="scenarios at once (default: %(default)s)")
    arguments = parser.parse_args()
    run = partial(
        measure,
        seconds=arguments.seconds,
        interval=arguments.interval,
        ranks=arguments.ranks,
        metric=catalog.OUTSIDE_ALLOCATOR_START if arguments.start else catalog.OUTSIDE_ALLOCATOR,
    )
    with ThreadPoolExecutor(arguments.at_once) as pool:
        show(list(pool.map(run, arguments.scenarios)))


if __name__ == "__main__":
    main()
