"""Measure what `torchmem run` adds before a program starts:

    python -m benchmarks.run_startup

CPU milliseconds of a Python process that does nothing, alone and with the hook of `torchmem run`,
and of `torchmem run` itself until it has become the command. Each is the mean of many runs, in
turns, in one process tree.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from torchmem.run.command import child_environment

RUNS = 30
PYTHON = [sys.executable, "-c", "pass"]


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """Run a command once and return the CPU time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the figures."""
    plain, hooked = dict(os.environ), child_environment(os.environ, {})
    cases = {
        "python -c pass": (PYTHON, plain),
        "the same with the hook": (PYTHON, hooked),
        "torchmem run -- true": ([sys.executable, "-m", "torchmem.cli", "run", "true"], plain),
    }
    totals = dict.fromkeys(cases, 0.0)
    for _ in range(RUNS):
        for name, (command, environment) in cases.items():
            totals[name] += cpu_seconds(command, environment)
    for name, total in totals.items():
        print(f"{name:<24}{1000 * total / RUNS:6.1f} ms CPU")


if __name__ == "__main__":
    main()
