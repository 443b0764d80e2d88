"""Measure what a scrape of the exporter costs, compared with two other exporters.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop-exporter    # optional
    PYTHONPATH=tests python -m benchmarks.exporter_scrape --peer /tmp/peer/bin/nvitop-exporter

The other exporters are nvitop-exporter, if given, and `floor`: prometheus_client's own server with
the same number of series. No GPU is needed, because all of them read the same fake NVML. Every rank
replaces its file before each scrape, as in training. CPU time covers all threads of the process, so
other load on the machine affects it little; wall time is only for information. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.scrape.node import Node
from benchmarks.scrape.server import Server, started
from support.idle_processes import idle_processes

SCRAPE_INTERVAL = 15.0
HEADER = (
    "| GPUs | ranks | exporter | series | CPU ms/scrape | p50 ms | p99 ms | CPU s/min | RSS MiB |"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exporter costs on one node.

    `cpu_seconds`, `p50` and `p99` (wall seconds) are of one scrape. `minute_cpu_seconds` is the CPU
    time of a minute with a scrape every 15 s, including the exporter's own polling. `memory_bytes`
    is the resident memory at the end.
    """

    series: int
    wire_bytes: int
    cpu_seconds: float
    p50: float
    p99: float
    minute_cpu_seconds: float
    memory_bytes: int


def measure(server: Server, publish: Callable[[], None], scrapes: int) -> Cost:
    """Measure the cost of a scrape; the minute and the memory are left 0."""
    server.scrape(), server.scrape()
    seconds, used = [], 0.0
    for _ in range(scrapes):
        publish()
        before = server.cpu_seconds
        answer = server.scrape()
        used += server.cpu_seconds - before
        seconds.append(answer.seconds)
    p99 = statistics.quantiles(seconds, n=100)[98] if scrapes > 1 else seconds[0]
    return Cost(
        answer.series, answer.wire_bytes, used / scrapes, statistics.median(seconds), p99, 0, 0
    )


def minute(
    servers: dict[str, Server], publish: Callable[[], None], seconds: float
) -> dict[str, float]:
    """Measure all servers at the same time for `seconds`; return CPU seconds per minute."""
    before = {name: server.cpu_seconds for name, server in servers.items()}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        publish()
        for server in servers.values():
            server.scrape()
        time.sleep(max(0.0, min(SCRAPE_INTERVAL, end - time.monotonic())))
    return {
        name: (server.cpu_seconds - before[name]) * 60 / seconds for name, server in servers.items()
    }


@contextmanager
def exporters(node: Node, peer: str | None) -> Iterator[dict[str, Server]]:
    """Start all exporters that are compared, on the same node."""
    environment = node.environment()
    flags = ["--listen", "127.0.0.1:PORT", "--run-dir", str(node.run_dir)]
    command = [sys.executable, "-m", "torchmem.cli", "exporter", *flags]
    with ExitStack() as stack:
        servers = {"torchmem": stack.enter_context(started(command, environment))}
        servers["torchmem"].scrape()
        time.sleep(1)  # GPM metrics need two reads with some time between them
        series = str(servers["torchmem"].scrape().series)
        floor = [sys.executable, "-m", "benchmarks.scrape.floor", "PORT", series]
        servers["floor"] = stack.enter_context(started(floor, environment))
        if peer:
            command = [*shlex.split(peer), "--port", "PORT"]
            servers["nvitop-exporter"] = stack.enter_context(started(command, environment))
            time.sleep(3)  # until it has polled once
        yield servers


def compare(gpus: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Cost]:
    """Measure every exporter on one node."""
    with tempfile.TemporaryDirectory() as folder, idle_processes(ranks) as pids:
        node = Node(Path(folder), gpus, pids)
        with exporters(node, arguments.peer) as servers:
            costs = {
                name: measure(server, node.publish, arguments.scrapes)
                for name, server in servers.items()
            }
            minutes = minute(servers, node.publish, arguments.minute)
            return {
                name: replace(
                    costs[name],
                    minute_cpu_seconds=minutes[name],
                    memory_bytes=server.memory_bytes,
                )
                for name, server in servers.items()
            }


def leak(scrapes: int) -> list[int]:
    """Return the exporter's resident bytes after each quarter of `scrapes` scrapes.

    The node has 8 GPUs and 64 ranks.
    """
    with tempfile.TemporaryDirectory() as folder, idle_processes(64) as pids:
        node = Node(Path(folder), 8, pids)
        with exporters(node, None) as servers:
            resident = []
            for number in range(1, scrapes + 1):
                node.publish()
                servers["torchmem"].scrape()
                if number % (scrapes // 4) == 0:
                    resident.append(servers["torchmem"].memory_bytes)
            return resident


def show(gpus: int, ranks: int, costs: dict[str, Cost]) -> None:
    """Print one row of the table for each exporter."""
    for name, cost in costs.items():
        print(
            f"| {gpus} | {ranks} | {name} | {cost.series:,} | {cost.cpu_seconds * 1e3:.1f} | "
            f"{cost.p50 * 1e3:.1f} | {cost.p99 * 1e3:.1f} | {cost.minute_cpu_seconds:.2f} | "
            f"{cost.memory_bytes / 2**20:.0f} |",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", help="command that starts nvitop-exporter (default: not measured)"
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 8, 64, 128, 512])
    parser.add_argument(
        "--scrapes", type=int, default=30, help="scrapes of each exporter (default: %(default)s)"
    )
    parser.add_argument(
        "--minute",
        type=float,
        default=60,
        help="seconds of a scrape every 15 s (default: 60)",
    )
    parser.add_argument(
        "--leak",
        type=int,
        default=2000,
        help="scrapes to find a leak (default: 2000)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure and print a table."""
    arguments = parse_arguments()
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}")
    figures = []
    for gpus, ranks in product(arguments.gpus, arguments.ranks):
        costs = compare(gpus, ranks, arguments)
        show(gpus, ranks, costs)
        row = {name: asdict(cost) for name, cost in costs.items()}
        figures.append({"gpus": gpus, "ranks": ranks, **row})
    memory = leak(arguments.leak) if arguments.leak >= 4 else []
    if memory:
        mebibytes = [round(count / 2**20, 1) for count in memory]
        print(f"\nRSS after each quarter of {arguments.leak} scrapes: {mebibytes} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"nodes": figures, "leak": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
