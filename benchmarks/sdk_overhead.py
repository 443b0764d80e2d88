"""What the SDK costs, beside Stormlog's tracker and a Lightning-style callback, all at their defaults.

    python -m benchmarks.sdk_overhead                            # on a GPU; without one, on the simulator
    python -m torchmem.phantom -- python -m benchmarks.sdk_overhead   # PyTorch's real allocator, no GPU needed

It takes about a quarter of an hour.

Every figure comes from a process of its own. CPU time is what the kernel counts for threads or processes, so other
load on the machine disturbs it little; what remains is that a cache gone cold makes the same work two to five times
dearer, which is why the shares of a core are measured in a process that mostly sleeps, and not computed.
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
Figures = dict[str, Any]


def child(module: str, *arguments: object) -> Any:
    """One measurement in a process of its own; the last line of its output is JSON."""
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
    """One tool after the other, so that none evicts another's caches."""
    able = [name for name in tools.TOOLS if tools.missing(name) is None]
    return {name: child("share", name, blocks, seconds, rate) for name in able}


def measure(arguments: argparse.Namespace) -> Figures:
    """Everything, one part after the other."""
    found: Figures = {"where": where(), "reads": [child("reads", blocks) for blocks in BLOCKS]}
    found["shares"] = [
        measure_shares(blocks, arguments.seconds, arguments.rate) for blocks in SHARE_BLOCKS
    ]
    if has_cuda():
        found["steps"] = child("steps", arguments.turn, arguments.turns)
    modules = ["prometheus_client", *(["torch"] if has_cuda() else [])]
    found["import"] = {module: startup.import_seconds(module, arguments.runs) for module in modules}
    found["memory"] = {
        blocks: startup.memory_bytes(blocks, 10.0, cuda=has_cuda()) for blocks in SHARE_BLOCKS
    }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="stretch for the shares (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, help="steps per second in it (default: %(default)s)"
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
    found = measure(arguments)
    print(json.dumps(found, indent=2) if arguments.json else show(found))


if __name__ == "__main__":
    main()
