"""Measure the CPU time of each rule, in a Prometheus that does nothing else.

    PYTHONPATH=tests python -m benchmarks.rules                      # 256 GPUs, about 7 minutes
    PYTHONPATH=tests python -m benchmarks.rules --data /tmp/fleet    # again, with that data

Needs Prometheus on PATH. First it scrapes a simulated fleet with the shipped rules (see
benchmarks.fleet). Then it starts Prometheus without targets and rules on the same data, and
evaluates each rule several times at the newest time. CPU time hardly depends on other work on the
machine. A rule is evaluated as count(...), so that the time has no part for its answer in JSON;
the time to store the results is missing, which benchmarks.fleet includes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from benchmarks.cluster.serve import GPUS, INTERVAL
from benchmarks.cluster.watching import shortened, watching
from support.stack import ROOT, answers, free_port, get, running
from support.waiting import until

MIN_CPU_SECONDS = 0.3
TICKS = os.sysconf("SC_CLK_TCK")
MAX_LISTED = 20


def main() -> None:
    """Measure and print the most expensive rules, and the sum per group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--speed", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--data", type=Path, help="folder to keep the data in, or with data")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.data or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "end").exists():
            with watching(folder, arguments.nodes, arguments.speed, "healthy"):
                time.sleep(arguments.seconds)
                (folder / "end").write_text(str(time.time() - 1))
        end = float((folder / "end").read_text())
        with alone(folder) as (url, pid):
            _show(list(_costs(url, pid, end, arguments.speed)), arguments.nodes * GPUS)


@contextmanager
def alone(folder: Path) -> Iterator[tuple[str, int]]:
    """Run Prometheus with the data of a folder and nothing to do; yield its URL and pid."""
    (folder / "alone.yml").write_text("{}\n")
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'alone.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with running(command, folder / "alone.log") as process:
        until(lambda: answers(f"http://{address}/-/ready"), 120)
        yield f"http://{address}", process.pid


def _costs(url: str, pid: int, end: float, speed: float) -> Iterator[tuple[float, str, str]]:
    """Yield CPU seconds per interval, group and name of each rule."""
    for path in sorted((ROOT / "prometheus" / "rules").glob("*.yml")):
        plain, short = (yaml.safe_load(text) for text in _texts(path, speed))
        for group, quick in zip(plain["groups"], short["groups"], strict=True):
            share = INTERVAL / _seconds(group.get("interval", f"{INTERVAL:g}s"))
            for rule in quick["rules"]:
                cost = _cpu(url, pid, rule["expr"], end) * share
                yield cost, group["name"], rule.get("record") or rule["alert"]


def _texts(path: Path, speed: float) -> tuple[str, str]:
    return path.read_text(), shortened(path.read_text(), speed)


def _seconds(duration: str) -> float:
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def _cpu(url: str, pid: int, expression: str, end: float) -> float:
    """Return the CPU seconds of one evaluation."""
    parameters = urllib.parse.urlencode({"query": f"count({expression})", "time": end})
    query = f"{url}/api/v1/query?{parameters}"
    get(query)
    before, times = _spent(pid), 0
    while _spent(pid) - before < MIN_CPU_SECONDS and times < 60:
        get(query)
        times += 1
    return (_spent(pid) - before) / times


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _show(costs: list[tuple[float, str, Any]], gpus: int) -> None:
    total = sum(cost for cost, _, _ in costs)
    share = total / INTERVAL
    print(f"All rules: {total:.3f} s of CPU per interval at {gpus:,} GPUs ({share:.1%} of a core),")
    print(f"{total / gpus * 1000:.3f} s at 1,000 GPUs.\n")
    print("| CPU ms | share | group | rule |\n|---|---|---|---|")
    for cost, group, name in sorted(costs, reverse=True)[:MAX_LISTED]:
        print(f"| {cost * 1e3:.1f} | {cost / total:.1%} | {group} | {name} |")
    groups: dict[str, float] = {}
    for cost, group, _ in costs:
        groups[group] = groups.get(group, 0.0) + cost
    print("\n| CPU ms | group |\n|---|---|")
    for group, cost in sorted(groups.items(), key=lambda item: -item[1]):
        print(f"| {cost * 1e3:.1f} | {group} |")


if __name__ == "__main__":
    main()
