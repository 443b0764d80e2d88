"""The configuration for large fleets is complete, and accepted by its programs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.local_http import Answer, Request, answering
from support.needs import needs
from support.promql import ROOT, rules
from support.scaled import SHARD, command, scaled, shard
from support.scrape_target import pages, serving
from support.simulated_time import scrapes
from support.stack import get
from support.waiting import until

PAGE = (ROOT / "docs" / "scaling.md").read_text()
RULES = {path.name for path in (ROOT / "prometheus" / "rules").glob("*.yml")}
SHARDS = 4


def of_store() -> set[str]:
    """Return the rules files that vmalert loads."""
    return {
        flag.rpartition("/")[2] for flag in command("vmalert.service") if flag.startswith("-rule=")
    }


def of_shard() -> set[str]:
    """Return the rules files that each Prometheus loads."""
    return {Path(file).name for file in yaml.safe_load(SHARD)["rule_files"]}


def test_every_rule_is_evaluated_in_one_place() -> None:
    """The servers and the store together load all rules files, and none twice."""
    assert of_shard() | of_store() == RULES
    assert of_shard() & of_store() == set()


def test_a_server_needs_no_rank_of_another_server() -> None:
    """No rule of a shard groups or joins by run without the instance, or reads one that does."""
    folder = ROOT / "prometheus" / "rules"
    across = {
        rule["record"]
        for kind in ("record",)
        for rule in rules(kind)
        if rule["record"].startswith(("run:", "cluster:"))
    }
    for name in of_shard():
        text = (folder / name).read_text()
        assert not re.findall(r"(?:by|on) \((?:job, )?run[^)]*\)", text), name
        assert [read for read in across if read in text] == [], name


def test_the_page_lists_the_files_by_place() -> None:
    """The table names each file of a shard, and the files of the store."""
    rows = dict(
        re.findall(r"^\| (`recording.+?|`alerts.+?) \| .+? \| (.+?) \|$", PAGE, re.MULTILINE)
    )
    shard = {
        name
        for files, place in rows.items()
        if place == "each Prometheus"
        for name in re.findall(r"`([\w-]+\.yml)`", files)
    }

    assert shard == of_shard()


def install(folder: Path, number: int) -> Path:
    """Write the configuration of one server with the shipped rules; return its path."""
    shutil.copytree(ROOT / "prometheus" / "rules", folder / "rules", dirs_exist_ok=True)
    (folder / "targets").mkdir(exist_ok=True)
    targets = [{"targets": [f"node{node}:9847" for node in range(64)]}]
    (folder / "targets" / "exporters.yml").write_text(json.dumps(targets))
    path = folder / f"prometheus-{number}.yml"
    path.write_text(shard(number))
    return path


@pytest.mark.stack
@needs("promtool")
def test_each_node_is_scraped_by_one_server(tmp_path: Path) -> None:
    """Promtool accepts the files of all shards, and each of 64 nodes is a target of one of them."""
    scraped = []
    for number in range(SHARDS):
        path = install(tmp_path, number)
        subprocess.run(["promtool", "check", "config", path], check=True, capture_output=True)
        found = subprocess.run(
            ["promtool", "check", "service-discovery", "--timeout=1s", path, "torchmem"],
            check=True,
            capture_output=True,
        )
        scraped += [
            target["labels"]["instance"]
            for target in json.loads(found.stdout)
            if target.get("labels")
        ]

    assert sorted(scraped) == sorted(f"node{number}:9847" for number in range(64))


@pytest.mark.stack
@needs("vmalert")
def test_vmalert_accepts_its_flags_and_rules() -> None:
    """A dry run with the flags of the unit reads every rule as it is shipped."""
    rules = str(ROOT / "prometheus" / "rules")
    installed = command("vmalert.service", {"/etc/torchmem/rules": rules})
    done = subprocess.run([*installed, "-dryRun"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.stack
@needs("victoria-metrics")
def test_the_store_knows_its_flags() -> None:
    """Each flag of the unit is one of the installed VictoriaMetrics."""
    help_text = subprocess.run(
        ["victoria-metrics", "-help"], capture_output=True, text=True, check=False
    )
    known = set(re.findall(r"^  -([\w.]+)", help_text.stdout + help_text.stderr, re.MULTILINE))

    assert {flag[1:].partition("=")[0] for flag in command("victoria-metrics.service")[1:]} <= known


def shard_of(address: str, shards: int) -> int:
    """Return which server scrapes an address: hashmod in Prometheus' model/relabel/relabel.go."""
    digest = hashlib.md5(address.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[8:], "big") % shards


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Serve a run whose two ranks died of an OOM, each on a node of another shard."""
    last = pages(scrapes("leak"))[-1]
    dated = re.sub(
        r"(?m)^(torchmem_last_oom_timestamp_seconds\{.*\}) .*$", rf"\1 {time.time()}", last
    )
    with ExitStack() as stack:
        found: dict[int, str] = {}
        while len(found) < 2:
            page = _without_rank(dated, len(found))
            address = stack.enter_context(serving(partial(str, page)))
            found.setdefault(shard_of(address, 2), address)
        yield list(found.values())


def _without_rank(page: str, rank: int) -> str:
    return "".join(line for line in page.splitlines(keepends=True) if f'rank="{rank}"' not in line)


def series(store: str, expression: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each series of an instant query."""
    text = urllib.parse.urlencode({"query": expression, "nocache": 1})
    result = json.loads(get(f"{store}/api/v1/query?{text}"))["data"]["result"]
    return [(row["metric"], float(row["value"][1])) for row in result]


@pytest.mark.stack
@needs("prometheus", "vmalert")
def test_the_whole_configuration_works_together(tmp_path: Path) -> None:
    """Two servers share a run, the store counts all of its ranks, and its alerts are sent."""
    sent: list[dict[str, Any]] = []

    def receive(request: Request) -> Answer:
        sent.extend(json.loads(request.body))
        return Answer()

    with (
        two_nodes() as nodes,
        answering(receive) as alertmanager,
        scaled(tmp_path, 2, nodes, alertmanager) as (store, servers),
    ):
        until(lambda: series(store, 'run:torchmem_ranks:count{state="oom"} == 2'), 60)
        until(lambda: {"0", "1"} <= {alert["labels"].get("rank") for alert in sent}, 60)
        scraped = [
            {row["instance"] for row, _ in series(server, 'up{job="torchmem"}')}
            for server in servers
        ]
        stored = series(store, "up")

    assert sorted(map(sorted, scraped)) == sorted([[node] for node in nodes])
    assert [value for _, value in stored] == [1.0, 1.0]
    assert not any("shard" in labels for labels, _ in stored)
    assert {
        (alert["labels"]["alertname"], alert["labels"]["severity"])
        for alert in sent
        if alert["labels"].get("rank")
    } == {("TorchmemOutOfMemory", "critical")}
