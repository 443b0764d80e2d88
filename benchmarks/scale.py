"""Run a fleet of 10,000 GPUs: sharded scraping, remote write, one store, and the rules in it.

    PYTHONPATH=tests python -m benchmarks.scale --nodes 1250 --interval 150 --intervals 4
    PYTHONPATH=tests python -m benchmarks.scale --nodes 125 250 500 --interval 60   # the line

Needs Debian's package victoria-metrics, and no GPU. The exporters are simulated, as for
benchmarks.fleet. Two vmagents scrape half of them each and write to one VictoriaMetrics, in which
vmalert evaluates all rules, those across ranks too. The interval is as long as this machine needs;
windows of the rules are longer by the same factor, so that each has as many samples as with a
scrape every 15 s. What counts is CPU time per interval: it hardly depends on the interval, and
other work on the machine changes it less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.serve import GPUS, INTERVAL
from benchmarks.cluster.watching import RULES, Watcher, exporters, shortened
from support.stack import answers, free_port, running
from support.waiting import until

SHARDS = 2
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
TARGETS = (10_000, 100_000)
# Debian's vmalert 1.79 does not know it; from 1.91 on it does.
_KEEP_FIRING = re.compile(r"\n +keep_firing_for: .*")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds per interval and resident bytes by program, and seconds by panel.

    `gpus` were scraped, `counted` is what the recorded series cluster:nvml_gpus:count says: less
    where rules had not caught up. `series` are in the store.
    """

    gpus: int
    counted: float
    series: float
    samples: float
    cpu: Mapping[str, float]
    memory: Mapping[str, float]
    panels: Mapping[str, float]
    panel_cpu: Mapping[str, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1250])
    parser.add_argument("--interval", type=int, default=150, help="seconds between two scrapes")
    parser.add_argument("--intervals", type=int, default=4, help="how many to run")
    arguments = parser.parse_args()
    costs = [_cost(nodes, arguments.interval, arguments.intervals) for nodes in arguments.nodes]
    _show(costs)


def _cost(nodes: int, interval: int, intervals: int) -> Cost:
    speed = INTERVAL / interval
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        server = stack.enter_context(exporters(folder, speed, "healthy"))
        store, pids = f"127.0.0.1:{free_port()}", dict[str, list[int]]()
        for name, command in _programs(folder, server, store, nodes, interval):
            process = stack.enter_context(running(command, folder / f"{name}.log"))
            pids.setdefault(name.rstrip("0123456789"), []).append(process.pid)
            if name == "victoria-metrics":
                until(lambda: answers(f"http://{store}/health"), 60)
        time.sleep(interval * (intervals - 1))
        watcher = Watcher(f"http://{store}", speed)
        before = {name: sum(map(_cpu, found)) for name, found in pids.items()}
        time.sleep(interval)
        cpu = {name: sum(map(_cpu, found)) - before[name] for name, found in pids.items()}
        memory = {name: sum(map(_resident, found)) for name, found in pids.items()}
        panels, spent = _panels(watcher, pids["victoria-metrics"][0])
        return Cost(
            nodes * GPUS,
            _last(watcher, "cluster:nvml_gpus:count", interval),
            watcher.own()["vm_cache_entries"]['{type="storage/hour_metric_ids"}'],
            _last(watcher, "sum(scrape_samples_scraped)", interval),
            cpu,
            memory,
            panels,
            spent,
        )


def _programs(
    folder: Path, server: str, store: str, nodes: int, interval: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of each program, in the order in which they start."""
    targets = [
        {
            "targets": [server],
            "labels": {"instance": f"node-{number}", "__metrics_path__": f"/node/{number}/metrics"},
        }
        for number in range(nodes)
    ]
    (folder / "targets.json").write_text(json.dumps(targets))
    (folder / "scrape.yml").write_text(
        f"global: {{scrape_interval: {interval}s, scrape_timeout: {interval}s}}\n"
        "scrape_configs:\n- job_name: torchmem\n"
        f"  file_sd_configs: [{{files: [{folder / 'targets.json'}]}}]\n"
    )
    (folder / "rules").mkdir()
    for path in RULES.glob("*.yml"):
        text = _KEEP_FIRING.sub("", shortened(path.read_text(), INTERVAL / interval))
        (folder / "rules" / path.name).write_text(text)
    url = f"http://{store}"
    yield (
        "victoria-metrics",
        [
            "victoria-metrics",
            f"-storageDataPath={folder / 'store'}",
            f"-httpListenAddr={store}",
            "-search.latencyOffset=1s",
            "-search.maxUniqueTimeseries=2000000",
            "-search.maxQueryDuration=120s",
            "-memory.allowedPercent=25",
        ],
    )
    for shard in range(SHARDS):
        yield (
            f"vmagent{shard}",
            [
                "vmagent",
                f"-promscrape.config={folder / 'scrape.yml'}",
                f"-promscrape.cluster.membersCount={SHARDS}",
                f"-promscrape.cluster.memberNum={shard}",
                f"-remoteWrite.url={url}/api/v1/write",
                f"-remoteWrite.tmpDataPath={folder / f'agent{shard}'}",
                f"-httpListenAddr=127.0.0.1:{free_port()}",
                "-memory.allowedPercent=5",
            ],
        )
    yield (
        "vmalert",
        [
            "vmalert",
            f"-rule={folder / 'rules' / '*.yml'}",
            f"-datasource.url={url}",
            f"-remoteWrite.url={url}",
            f"-evaluationInterval={interval}s",
            "-notifier.url=http://127.0.0.1:9",
            "-remoteWrite.maxQueueSize=10000000",
            f"-httpListenAddr=127.0.0.1:{free_port()}",
        ],
    )


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def _last(watcher: Watcher, expression: str, interval: int) -> float:
    """Return the newest value of an expression, which may be two intervals old."""
    over = f"last_over_time(({expression})[{2 * interval}s:{interval // 2}s])"
    return watcher.value(over)


def _panels(watcher: Watcher, pid: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each panel: the fastest of three times, and CPU time of the store."""
    wall: dict[str, float] = {}
    spent: dict[str, float] = {}
    for _ in range(3):
        for name, ask in watcher.panel_queries():
            before, started = _cpu(pid), time.perf_counter()
            # A store that does not answer a query in time has no number for the panel.
            try:
                ask()
            except OSError:
                print(f"no answer for the panel {name!r}")
                continue
            took, used = time.perf_counter() - started, _cpu(pid) - before
            wall[name] = min(took, wall.get(name, took))
            spent[name] = min(used, spent.get(name, used))
    return wall, spent


def _show(costs: Sequence[Cost]) -> None:
    for cost in costs:
        print(
            f"\n{cost.gpus:,} GPUs, {cost.counted:,.0f} in cluster:nvml_gpus:count, "
            f"{cost.samples:,.0f} samples per scrape, {cost.series:,.0f} series"
        )
        print("| program | CPU s per interval | resident MiB |\n|---|---|---|")
        for name, seconds in cost.cpu.items():
            print(f"| {name} | {seconds:.1f} | {cost.memory[name] / 2**20:,.0f} |")
        print("\n| panel of Fleet | wall s | CPU s of the store |\n|---|---|---|")
        for name, seconds in sorted(cost.panels.items(), key=lambda item: -item[1]):
            print(f"| {name} | {seconds:.2f} | {cost.panel_cpu[name]:.2f} |")
    if len(costs) > 1:
        _line(costs)


def _line(costs: Sequence[Cost]) -> None:
    """Print what the least-squares line through the measured sizes says about larger ones."""
    print("\n| GPUs, on the line | " + " | ".join(f"{name} CPU s" for name in costs[0].cpu) + " |")
    print("|" + "---|" * (1 + len(costs[0].cpu)))
    for gpus in TARGETS:
        cells = []
        for name in costs[0].cpu:
            line = statistics.linear_regression(
                [cost.gpus for cost in costs], [cost.cpu[name] for cost in costs]
            )
            cells.append(f"{line.slope * gpus + line.intercept:,.0f}")
        print(f"| {gpus:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
