"""What a scrape of the exporter costs, beside nvitop-exporter and a bare prometheus_client page of as many series.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop-exporter    # the benchmark runs without it, too
    PYTHONPATH=tests python -m benchmarks.exporter_scrape --peer /tmp/peer/bin/nvitop-exporter

No GPU is needed: all of them ask the same fake NVML. Before each scrape every rank replaces its file, as in training.
CPU time is the process's own, all threads, so that other load on the machine disturbs it little; wall time is for
information. Needs a C compiler.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.scrape.node import Node, processes
from benchmarks.scrape.server import Server, started

SCRAPE_INTERVAL = 15.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exporter cost on one node.

    `cpu_seconds` of a scrape; `p50`, `p99` wall seconds of a scrape; `minute_cpu_seconds` of a minute with a scrape
    every 15 s, its own polling included; `memory_bytes` resident after it all.
    """

    series: int
    wire_bytes: int
    cpu_seconds: float
    p50: float
    p99: float
    minute_cpu_seconds: float
    memory_bytes: int


def measure(server: Server, publish: Callable[[], None], scrapes: int) -> Cost:
    """The cost of a scrape, without the minute."""
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
    """CPU seconds of each over the same stretch, with the scrapes that fall into it, as of one minute."""
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
    """All that are compared, on the same node."""
    environment = node.environment()
    ours = [
        sys.executable,
        "-m",
        "torchmem.exporter",
        "--listen",
        "127.0.0.1:PORT",
        "--run-dir",
        str(node.run_dir),
    ]
    with ExitStack() as stack:
        found = {"torchmem": stack.enter_context(started(ours, environment))}
        series = str(found["torchmem"].scrape().series)
        floor = [sys.executable, "-m", "benchmarks.scrape.floor", "PORT", series]
        found["floor"] = stack.enter_context(started(floor, environment))
        if peer:
            command = [*shlex.split(peer), "--port", "PORT"]
            found["nvitop-exporter"] = stack.enter_context(started(command, environment))
            time.sleep(3)  # its first round
        yield found


def compare(gpus: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Cost]:
    """Every exporter on one node."""
    with tempfile.TemporaryDirectory() as folder, processes(ranks) as pids:
        node = Node(Path(folder), gpus, pids)
        with exporters(node, arguments.peer) as servers:
            costs = {
                name: measure(server, node.publish, arguments.scrapes)
                for name, server in servers.items()
            }
            minutes = minute(servers, node.publish, arguments.minute)
            return {
                name: Cost(
                    **asdict(cost)
                    | {"minute_cpu_seconds": minutes[name], "memory_bytes": server.memory_bytes}
                )
                for (name, cost), server in zip(costs.items(), servers.values(), strict=True)
            }


def leak(scrapes: int) -> list[int]:
    """Resident bytes of the exporter after each quarter of `scrapes` scrapes, with 8 GPUs and 64 ranks."""
    with tempfile.TemporaryDirectory() as folder, processes(64) as pids:
        node = Node(Path(folder), 8, pids)
        with exporters(node, None) as servers:
            found = []
            for number in range(1, scrapes + 1):
                node.publish()
                servers["torchmem"].scrape()
                if number % (scrapes // 4) == 0:
                    found.append(servers["torchmem"].memory_bytes)
            return found


def show(gpus: int, ranks: int, costs: dict[str, Cost]) -> None:
    """One row of the table for each exporter."""
    for name, cost in costs.items():
        print(
            f"| {gpus} | {ranks} | {name} | {cost.series:,} | {cost.cpu_seconds * 1e3:.1f} | {cost.p50 * 1e3:.1f}"
            f" | {cost.p99 * 1e3:.1f} | {cost.minute_cpu_seconds:.2f} | {cost.memory_bytes / 2**20:.0f} |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", help="command that starts nvitop-exporter (default: leave it out)"
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 8, 64, 128, 512])
    parser.add_argument(
        "--scrapes", type=int, default=30, help="scrapes of each (default: %(default)s)"
    )
    parser.add_argument(
        "--minute", type=float, default=60, help="seconds of the stretch (default: %(default)s)"
    )
    parser.add_argument(
        "--leak", type=int, default=2000, help="scrapes to look for a leak (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    print(
        "| GPUs | ranks | exporter | series | CPU ms/scrape | p50 ms | p99 ms | CPU s/minute | RSS MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    figures = []
    for gpus in arguments.gpus:
        for ranks in arguments.ranks:
            costs = compare(gpus, ranks, arguments)
            show(gpus, ranks, costs)
            figures.append(
                {
                    "gpus": gpus,
                    "ranks": ranks,
                    **{name: asdict(cost) for name, cost in costs.items()},
                }
            )
    memory = leak(arguments.leak) if arguments.leak >= 4 else []
    if memory:
        print(
            f"\nRSS after each quarter of {arguments.leak} scrapes: {[round(b / 2**20, 1) for b in memory]} MiB"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"nodes": figures, "leak": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
