"""Compare what the exporter costs with nvitop-exporter and with an earlier checkout, in one run.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install nvitop-exporter    # optional
    git worktree add /tmp/before COMMIT                                       # optional
    PYTHONPATH=tests python -m benchmarks.exporter_cost \\
        --peer /tmp/peer/bin/nvitop-exporter --before /tmp/before

All exporters read the same fake NVML, or with --real-gpus the driver of this machine, and run at
the same time. CPU time is what the kernel counts for all threads of a process: for two minutes
without a scrape and without a rank; for two minutes without a scrape but with ranks, which the
exporter follows for its live page; then for two minutes with a scrape every 15 s as Prometheus
scrapes, before each of which every rank publishes other values. The exporters are scraped in turns,
so that all find cold caches.
Instructions per scrape are counted by callgrind, if valgrind is installed. Needs a C compiler
or GPUs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.exporter_scrape import SCRAPE_INTERVAL
from benchmarks.scrape import instructions
from benchmarks.scrape.node import Node, Ranks
from benchmarks.scrape.server import Server, started
from support.idle_processes import idle_processes

from torchmem.exporter.driver import Driver, PyNvml
from torchmem.exporter.nvml import NvmlDownError

PEER = "nvitop-exporter"
ROOTS = ("core/src", "sdk/src", "exporter/src", "lab/src", "tools/src")
SETTLING_SECONDS = 10.0
HEADER = (
    "| GPUs | ranks | exporter | series | idle, % of a core | followed, % of a core | "
    "CPU s in 2 min | of the peer | instructions per scrape, million | RSS MiB |"
)


@dataclass(frozen=True, slots=True)
class Program:
    """An exporter: how it is started, and its environment."""

    command: list[str]
    environment: Mapping[str, str]


def programs(node: Ranks, arguments: argparse.Namespace) -> Iterator[tuple[str, Program]]:
    """Yield the exporters to compare, by name."""
    environment = node.environment()
    flags = ["--listen", "127.0.0.1:PORT", "--run-dir", str(node.run_dir)]
    command = [sys.executable, "-m", "torchmem.cli", "exporter", *flags]
    yield "torchmem", Program(command, environment)
    if arguments.before:
        path = [str(arguments.before / root) for root in ROOTS]
        path += filter(None, [environment.get("PYTHONPATH")])
        yield "torchmem, before", Program(command, {**environment, "PYTHONPATH": ":".join(path)})
    if arguments.peer:
        yield PEER, Program([*shlex.split(arguments.peer), "--port", "PORT"], environment)


@contextmanager
def running(all_programs: Mapping[str, Program]) -> Iterator[dict[str, Server]]:
    """Start the exporters, and wait until they are at rest."""
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(started(program.command, program.environment))
            for name, program in all_programs.items()
        }
        for _ in range(2):
            for server in servers.values():
                server.scrape()
            time.sleep(SETTLING_SECONDS / 2)
        yield servers


def spent(servers: Mapping[str, Server], act: Callable[[], None]) -> dict[str, float]:
    """Return the CPU seconds of each server while `act` runs."""
    before = {name: server.cpu_seconds for name, server in servers.items()}
    act()
    return {name: server.cpu_seconds - before[name] for name, server in servers.items()}


def scrape_for(servers: Mapping[str, Server], publish: Callable[[], None], seconds: float) -> None:
    """Scrape each server every 15 s, in turns: none finds the caches that another has filled."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for server in servers.values():
            publish()
            server.scrape()
            pause = min(SCRAPE_INTERVAL / len(servers), end - time.monotonic())
            time.sleep(max(0.0, pause))


def real_uuids() -> list[str]:
    """Return the UUIDs of this machine's GPUs; end the program without a driver."""
    driver = Driver(PyNvml())
    try:
        return [gpu.uuid for gpu in driver.list_gpus().present]
    except NvmlDownError as error:
        sys.exit(f"{error}: run without --real-gpus for a fake NVML.")
    finally:
        driver.close()


def compare(gpus: int, ranks: int, arguments: argparse.Namespace) -> None:
    """Print a row for each exporter on one node."""
    seconds: float = arguments.seconds
    with tempfile.TemporaryDirectory() as folder, idle_processes(ranks) as pids:
        node = (
            Ranks(Path(folder), real_uuids(), pids)
            if arguments.real_gpus
            else Node(Path(folder), gpus, pids)
        )
        found = dict(programs(node, arguments))
        with running(found) as servers:
            node.retract()
            for server in servers.values():
                server.scrape()
            time.sleep(SETTLING_SECONDS)
            idle = spent(servers, lambda: time.sleep(seconds))
            node.publish()
            for server in servers.values():
                server.scrape()
            unscraped = spent(servers, lambda: time.sleep(seconds))
            scraped = spent(servers, lambda: scrape_for(servers, node.publish, seconds))
            series = {name: server.scrape().series for name, server in servers.items()}
            memory = {name: server.memory_bytes / 2**20 for name, server in servers.items()}
        for name, program in found.items():
            ratio = f"{scraped[name] / scraped[PEER]:.3f}" if scraped.get(PEER) else "–"
            print(
                f"| {gpus} | {ranks} | {name} | {series[name]:,} | {100 * idle[name] / seconds:.3f}"
                f" | {100 * unscraped[name] / seconds:.3f} | {scraped[name] * 120 / seconds:.3f} | "
                f"{ratio} | {counted(program, node)} | {memory[name]:.0f} |",
                flush=True,
            )


def counted(program: Program, node: Ranks) -> str:
    """Return millions of instructions per scrape; those of a compiled peer are not counted."""
    is_countable = isinstance(node, Node) and "torchmem.cli" in program.command
    if instructions.missing() or not is_countable:
        return "–"
    command = [*program.command, *instructions.PATIENT_FLAGS]
    count = instructions.per_scrape(command, program.environment, node.publish)
    return f"{count / 1e6:.0f}"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="command that starts nvitop-exporter")
    parser.add_argument("--before", type=Path, help="an earlier checkout of torchmem")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8], help="of the fake NVML")
    parser.add_argument("--real-gpus", action="store_true", help="this machine's, a rank on each")
    parser.add_argument("--seconds", type=float, default=120, help="of each phase (default: 120)")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed: pip compiles a package
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}")
    for gpus in [len(real_uuids())] if arguments.real_gpus else arguments.gpus:
        compare(gpus, gpus, arguments)


if __name__ == "__main__":
    main()
