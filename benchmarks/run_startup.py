"""Measure what `torchmem run` and TORCHMEM=1 add before a program starts, and to its CPU time:

    python -m benchmarks.run_startup
    python -m benchmarks.run_startup --program train.py    # another program; it needs its GPU

For Python alone, with the hook in it, and under `torchmem run`: the CPU time and the wall time
until the first line of a script, and the CPU time of whole programs with their children. Each
figure is the median of runs in turns. CPU time depends little on other load; wall time depends on
it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmem.run.launch import child_environment

RUNS = 20
FIRST_LINE = "import time; print(time.process_time(), time.time())"
PROGRAMS = {"python -c pass": ("-c", "pass"), "python -c 'import torch'": ("-c", "import torch")}
RUN = ("-m", "torchmem.cli", "run", "--", sys.executable)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to start Python: arguments before the program's, and the environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def run(self, *program: str) -> str:
        """Run a program and return what it printed."""
        command = [sys.executable, *self.arguments, *program]
        done = subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout


WAYS = {
    "alone": Way((), os.environ),
    "with the hook": Way((), child_environment(os.environ, {})),
    "under torchmem run": Way(RUN, os.environ),
}


def until_first_line(way: Way) -> tuple[float, float]:
    """Return the CPU and wall milliseconds until a script's first line.

    `torchmem run` becomes the program, so the process's CPU time includes it.
    """
    started = time.time()
    cpu, wall = map(float, way.run("-c", FIRST_LINE).split())
    return 1000 * cpu, 1000 * (wall - started)


def whole_run(way: Way, program: tuple[str, ...]) -> float:
    """Return the CPU milliseconds of a program and its children."""
    before = _children_cpu()
    way.run(*program)
    return 1000 * (_children_cpu() - before)


def figures(way: Way, programs: Mapping[str, tuple[str, ...]]) -> Iterator[float]:
    """Yield a measurement for each column."""
    yield from until_first_line(way)
    for program in programs.values():
        yield whole_run(way, program)


def main() -> None:
    """Print a table, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="append", default=[], help="a script to run, too")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of each (default {RUNS})")
    arguments = parser.parse_args()
    programs = PROGRAMS | {f"python {path}": (path,) for path in arguments.program}
    measured: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for _ in range(arguments.runs):
        for name, way in WAYS.items():
            measured[name].append(list(figures(way, programs)))
    columns = ("first line, CPU", "first line, wall", *(f"CPU of {name}" for name in programs))
    for index, column in enumerate(columns):
        print(column)
        for name, rows in measured.items():
            print(f"  {name:<20}{statistics.median(row[index] for row in rows):9.1f} ms")


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
