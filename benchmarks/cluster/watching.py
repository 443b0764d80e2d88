"""Prometheus with the shipped rules, which scrapes a simulated fleet, and its resource usage."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.serve import INTERVAL
from support.dashboards import PANELS, filled_in
from support.stack import ROOT, answers, free_port, get, running
from support.waiting import until

_DURATION = re.compile(
    r"(?<=\[)\d+[smhd](?=\])|(?<=offset )\d+[smhd]|(?<=for: )\d+[smhd]|(?<=interval: )\d+[smhd]"
)
# The step of a subquery is what a rule records, and so an interval too.
_SUBQUERY = re.compile(r"(?<=:)\d+[smhd](?=\])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
HOUR = 3600
RULES = ROOT / "prometheus" / "rules"


def shortened(rules: str, speed: float) -> str:
    """Divide every window, offset and delay by `speed`, so that each has the same samples."""
    return _DURATION.sub(lambda match: _divided(match[0], speed), rules)


def seconds(duration: str) -> int:
    """Return the seconds of a duration with one unit, such as 5m."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def _divided(duration: str, speed: float) -> str:
    return f"{seconds(duration) * 1000 / speed:.0f}ms"


@dataclass(frozen=True, slots=True)
class Watcher:
    """A running Prometheus; `speed` simulated seconds pass in one second.

    Panels are drawn at `at` (Unix seconds), or now.
    """

    url: str
    speed: float
    at: float | None = None

    def own(self) -> dict[str, dict[str, float]]:
        """Return Prometheus' own metrics: by name, the value by the text of the labels."""
        metrics: dict[str, dict[str, float]] = {}
        for line in get(f"{self.url}/metrics").decode().splitlines():
            if matched := re.fullmatch(r"([a-z_]+)(\{.*\})? (\S+)", line):
                metrics.setdefault(matched[1], {})[matched[2] or ""] = float(matched[3])
        return metrics

    def ask(self, path: str, **parameters: Any) -> Any:
        """Return the data of a response of the HTTP API."""
        return json.loads(self.fetch(path, **parameters))["data"]

    def fetch(self, path: str, **parameters: Any) -> bytes:
        """Return a response of the HTTP API, which no cache of a store may answer."""
        text = urllib.parse.urlencode({"nocache": 1, **parameters})
        return get(f"{self.url}/api/v1/{path}?{text}")

    def value(self, expression: str) -> float:
        """Return the only value of an expression, 0 if it has none."""
        result = self.ask("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else 0.0

    def rules(self) -> dict[str, float]:
        """Return seconds per interval that each rule takes, by group and name.

        A group with an interval of its own is evaluated more rarely.
        """
        groups = self.ask("rules")["groups"]
        return {
            f"{group['name']}: {number} {rule['name']}": rule["evaluationTime"]
            * min(1.0, INTERVAL / self.speed / group["interval"])
            for group in groups
            for number, rule in enumerate(group["rules"])
        }

    def panels(self) -> dict[str, float]:
        """Return seconds that each panel of the dashboard Fleet takes, over all of its queries."""
        return {name: ask() for name, ask in self.panel_queries()}

    def panel_queries(
        self, board: str = "fleet", **variables: str
    ) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield each panel of a dashboard, and a function that asks for it and returns seconds."""
        for name, panel in PANELS.items():
            if name.startswith(f"{board}: "):
                title = name.removeprefix(f"{board}: ")
                yield title, partial(self._all_seconds, panel["targets"], variables)

    def _all_seconds(
        self, targets: Sequence[dict[str, Any]], variables: Mapping[str, str]
    ) -> float:
        return sum(self._seconds(target, variables) for target in targets)

    def _seconds(self, target: dict[str, Any], variables: Mapping[str, str]) -> float:
        span = f"{HOUR / self.speed:.0f}s"
        text = _SUBQUERY.sub(
            lambda match: _divided(match[0], self.speed),
            filled_in(target["expr"], span=span, **variables),
        )
        end = self.at or time.time()
        over = {"start": end - HOUR / self.speed, "end": end, "step": INTERVAL / self.speed}
        begun = time.perf_counter()
        if target["range"]:
            self.fetch("query_range", query=text, **over)
        else:
            self.fetch("query", query=text, time=end)
        return time.perf_counter() - begun


@contextmanager
def watching(folder: Path, nodes: int, speed: float, state: str) -> Iterator[Watcher]:
    """Run a fleet, and Prometheus that scrapes it every 15 simulated seconds.

    The state of all `nodes` is `state`: healthy or sick.
    """
    with exporters(folder, speed, state) as server, scraping(folder, server, nodes, speed) as url:
        yield Watcher(url, speed)


@contextmanager
def exporters(folder: Path, speed: float, state: str) -> Iterator[str]:
    """Serve the pages of all nodes; yield HOST:PORT."""
    server = f"127.0.0.1:{free_port()}"
    fleet = [
        sys.executable,
        "-m",
        "benchmarks.cluster.serve",
        server.rpartition(":")[2],
        str(speed),
        str(time.time()),
        state,
    ]
    with running(fleet, folder / "fleet.log"):
        until(lambda: answers(f"http://{server}/node/0/metrics"), 60)
        yield server


@contextmanager
def scraping(
    folder: Path, server: str, nodes: int, speed: float, rules: Path = RULES
) -> Iterator[str]:
    """Run a Prometheus that scrapes the nodes of a server, with the rules of a folder.

    Yields its URL.
    """
    folder.mkdir(exist_ok=True)
    port = free_port()
    _configure(folder, server, nodes, speed, rules)
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with running(command, folder / "prometheus.log"):
        until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), 60)
        yield f"http://127.0.0.1:{port}"


def write_rules(folder: Path, rules: Path, speed: float) -> None:
    """Write the rules of a folder to folder/rules, with their windows divided by `speed`."""
    (folder / "rules").mkdir()
    for path in rules.glob("*.yml"):
        (folder / "rules" / path.name).write_text(shortened(path.read_text(), speed))


def write_targets(folder: Path, server: str, nodes: int) -> None:
    """Write folder/targets.json: all nodes of a server."""
    targets = [
        {
            "targets": [server],
            "labels": {"instance": f"node-{number}", "__metrics_path__": f"/node/{number}/metrics"},
        }
        for number in range(nodes)
    ]
    (folder / "targets.json").write_text(json.dumps(targets))


def _configure(folder: Path, server: str, nodes: int, speed: float, rules: Path) -> None:
    write_rules(folder, rules, speed)
    write_targets(folder, server, nodes)
    interval = f"{INTERVAL * 1000 / speed:.0f}ms"
    (folder / "prometheus.yml").write_text(
        "global:\n"
        f"  {{scrape_interval: {interval}, scrape_timeout: {interval}, "
        f"evaluation_interval: {interval}}}\n"
        "rule_files: [rules/*.yml]\n"
        "scrape_configs: [{job_name: torchmem, file_sd_configs: [{files: [targets.json]}]}]\n"
    )
