"""Prometheus evaluates the rules and sends everything on; another store answers the dashboard from what it was sent."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from support.dashboards import PANELS, filled_in
from support.golden_scrapes import GOLDEN
from support.replay import pages, serving
from support.simulated_time import scrapes
from support.stack import answers, free_port, get, prometheus, running
from support.waiting import until

Answer = dict[str, list[tuple[float, float]]]
"""Time and value of each point, by the labels of the series."""

BUSY = GOLDEN / "h100_busy.metrics"
PLAYED_SECONDS = 30.0
STEP = 5
# VictoriaMetrics keeps twelve decimal digits, Prometheus binary numbers of fifteen.
PRECISION = 1e-11
FLEET = {
    f"{name.removeprefix('fleet: ')} {target['refId']}": (
        filled_in(target["expr"], span="1m"),
        bool(target["range"]),
    )
    for name, panel in PANELS.items()
    if name.startswith("fleet: ")
    for target in panel["targets"]
}


@dataclass(frozen=True)
class Stores:
    """URLs of Prometheus and of the store that it writes to, and a stretch of time for which both can be asked."""

    prometheus: str
    victoria: str
    start: float
    end: float

    def answers(self, name: str) -> list[Answer]:
        """What each of them answers to a query of the dashboard."""
        text, is_range = FLEET[name]
        over = (
            {"start": self.start, "end": self.end, "step": STEP} if is_range else {"time": self.end}
        )
        parameters = urllib.parse.urlencode({"query": text, "nocache": 1, **over})
        path = f"/api/v1/query{'_range' if is_range else ''}?{parameters}"
        return [_points(get(store + path)) for store in (self.prometheus, self.victoria)]


def _points(body: bytes) -> Answer:
    rows = json.loads(body)["data"]["result"]
    return {
        json.dumps(row["metric"], sort_keys=True): [
            (at, float(value)) for at, value in row.get("values", [row.get("value")])
        ]
        for row in rows
    }


def same(one: Answer, other: Answer) -> bool:
    """Whether both hold the same series with the same values at the same times."""
    return one.keys() == other.keys() and all(_same_points(one[name], other[name]) for name in one)


def _same_points(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    return len(one) == len(other) and all(
        at == other_at and math.isclose(value, other_value, rel_tol=PRECISION)
        for (at, value), (other_at, other_value) in zip(one, other, strict=True)
    )


@contextmanager
def victoria_metrics(folder: Path) -> Iterator[str]:
    """VictoriaMetrics on loopback, which shows what it was sent after 1 s instead of 30 s; yields its URL."""
    address = f"127.0.0.1:{free_port()}"
    command = ["victoria-metrics", f"-storageDataPath={folder / 'victoria'}", f"-httpListenAddr={address}",
               "-search.latencyOffset=1s", "-memory.allowedBytes=256MB"]  # fmt: skip
    with running(command, folder / "victoria.log"):
        until(lambda: answers(f"http://{address}/health"))
        yield f"http://{address}"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """A busy node, and two ranks that leak, more than an hour in 30 seconds, as both stores know them."""
    if not shutil.which("victoria-metrics"):
        pytest.skip("victoria-metrics not on PATH; apt-get install victoria-metrics")
    folder = tmp_path_factory.mktemp("remote_write")
    played = pages(scrapes("leak"))
    started = cache(time.time)  # at the first scrape, however long Prometheus takes to come up
    # The error of the recorded node happened now: an alert looks at its time.
    node = re.sub(
        r"(?m)^(torchmem_last_oom_timestamp_seconds\{.*\}) .*$",
        rf"\1 {time.time()}",
        BUSY.read_text(),
    )

    def page() -> str:
        return played[
            min(int((time.time() - started()) / PLAYED_SECONDS * len(played)), len(played) - 1)
        ]

    with ExitStack() as stack:
        targets = [stack.enter_context(serving(page)), stack.enter_context(serving(lambda: node))]
        victoria = stack.enter_context(victoria_metrics(folder))
        watching = stack.enter_context(
            prometheus(folder, targets[0], remote_write=f"{victoria}/api/v1/write")
        )
        (folder / "prometheus" / "targets" / "exporters.yml").write_text(
            json.dumps([{"targets": targets}])
        )
        until(lambda: time.time() > started() + PLAYED_SECONDS, pause=0.5)
        until(lambda: watching.query("ALERTS{alertstate='firing'}"), pause=0.5)
        until(lambda: watching.query("instance:nvml_gpus:count"), pause=0.5)
        time.sleep(2 * STEP)
        end = math.floor(time.time())
        yield Stores(watching.url, victoria, end - 4 * STEP, end)


@pytest.mark.stack
def test_the_fleet_dashboard_is_answered_alike_by_both_stores(stores: Stores) -> None:
    """Every query of the dashboard "Fleet" has the same series and values in the store that Prometheus writes to."""

    def differing() -> list[str]:
        return [name for name in FLEET if not same(*stores.answers(name))]

    with suppress(AssertionError):
        until(lambda: not differing(), pause=1)
    assert [] == differing()


@pytest.mark.stack
def test_every_panel_was_compared_with_an_answer(stores: Stores) -> None:
    """No panel of "Fleet" is equal only because both stores are silent about it."""
    panels = {name.rpartition(" ")[0] for name in FLEET}
    assert panels == {name.rpartition(" ")[0] for name in FLEET if all(stores.answers(name))}
