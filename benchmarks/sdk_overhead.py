"""The cost of the SDK, of Stormlog's tracker, and of a Lightning-style callback, at defaults.

    python -m benchmarks.sdk_overhead                               # on a GPU, or on the simulator
    python -m torchmem.phantom -- python -m benchmarks.sdk_overhead   # on the phantom GPU

The phantom GPU runs PyTorch's real allocator on a machine without a GPU. A run takes about 15
minutes.

Every figure comes from a process of its own. CPU time is what the kernel counts for threads or
processes, so other load on the machine disturbs it little. With cold caches the same work takes two
to five times as long; the shares of a core are therefore measured in a process that mostly sleeps,
and not computed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.overhead import startup, tools
from benchmarks.overhead.report import show
from benchmarks.overhead.workload import has_cuda, where

BLOCKS = (100, 1_000, 2_000, 10_000, 100_000)
SHARE_BLOCKS = (2_000, 100_000)
BUSY_RATES = (1, 10, 100)
Figures = dict[str, Any]


def child(module: str, *arguments: object) -> Any:
    """Run one measurement in a process of its own; the last line of its output is JSON."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        f"benchmarks.overhead.{module}",
        *map(str, arguments),
    ]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def measure_shares(blocks: int, seconds: float, rate: float) -> Figures:
    """Measure one tool after the other, so that none evicts another's caches."""
    able = [name for name in tools.TOOLS if tools.missing(name) is None]
    return {name: child("share", name, blocks, seconds, rate, "sleep") for name in able}


def measure(arguments: argparse.Namespace) -> Figures:
    """Measure everything, one part after the other."""
    figures: Figures = {"where": where(), "reads": [child("reads", blocks) for blocks in BLOCKS]}
    figures["shares"] = [
        measure_shares(blocks, arguments.seconds, arguments.rate) for blocks in SHARE_BLOCKS
    ]
    figures["busy"] = {
        rate: child("share", "torchmem", SHARE_BLOCKS[0], arguments.seconds, rate, "compute")
        for rate in BUSY_RATES
    }
    if has_cuda():
        figures["steps"] = child("steps", arguments.turn, arguments.turns)
    modules = ["prometheus_client", *(["torch"] if has_cuda() else [])]
    figures["import"] = {
        module: startup.import_seconds(module, arguments.runs) for module in modules
    }
    figures["memory"] = {
        blocks: startup.memory_bytes(blocks, 10.0, cuda=has_cuda()) for blocks in SHARE_BLOCKS
    }
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time for each share (default: %(default)s)"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=1.0,
        help="steps per second in that time (default: %(default)s)",
    )
    parser.add_argument(
        "--turn",
        type=float,
        default=4.0,
        help="seconds of one turn of steps (default: %(default)s)",
    )
    parser.add_argument(
        "--turns", type=int, default=8, help="turns with each tool (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=int, default=15, help="processes for the import time (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    figures = measure(arguments)
    print(json.dumps(figures, indent=2) if arguments.json else show(figures))


if __name__ == "__main__":
    main()
