"""The configuration for large fleets is complete, and accepted by its programs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.promql import ROOT, rules

SCALE = ROOT / "deploy" / "scale"
PAGE = (ROOT / "docs" / "scaling.md").read_text()
SHARD = (SCALE / "prometheus-shard.yml").read_text()
RULES = {path.name for path in (ROOT / "prometheus" / "rules").glob("*.yml")}
SHARDS = 4
# Debian's vmalert 1.79 does not know it; docs/scaling.md says so.
NEWER = re.compile(r"\n +keep_firing_for: .*")


def flags(unit: str) -> list[str]:
    """Return the command of a systemd unit."""
    text = (SCALE / unit).read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
    return command.split()  # type: ignore[no-any-return]


def of_store() -> set[str]:
    """Return the rules files that vmalert loads."""
    return {
        flag.rpartition("/")[2] for flag in flags("vmalert.service") if flag.startswith("-rule=")
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


def install(folder: Path, shard: int) -> Path:
    """Write the configuration of one server with the shipped rules; return its path."""
    shutil.copytree(ROOT / "prometheus" / "rules", folder / "rules", dirs_exist_ok=True)
    (folder / "targets").mkdir(exist_ok=True)
    targets = [{"targets": [f"node{number}:9847" for number in range(64)]}]
    (folder / "targets" / "exporters.yml").write_text(json.dumps(targets))
    assert SHARD.count('"0"') == 2
    path = folder / f"prometheus-{shard}.yml"
    path.write_text(SHARD.replace('"0"', f'"{shard}"'))
    return path


@pytest.mark.stack
@pytest.mark.skipif(not shutil.which("promtool"), reason="apt-get install prometheus")
def test_each_node_is_scraped_by_one_server(tmp_path: Path) -> None:
    """Promtool accepts the files of all shards, and each of 64 nodes is a target of one of them."""
    scraped = []
    for shard in range(SHARDS):
        path = install(tmp_path, shard)
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
@pytest.mark.skipif(not shutil.which("vmalert"), reason="apt-get install victoria-metrics")
def test_vmalert_accepts_its_flags_and_rules(tmp_path: Path) -> None:
    """A dry run with the flags of the unit reads every rule, without a field that 1.79 lacks."""
    for path in (ROOT / "prometheus" / "rules").glob("*.yml"):
        (tmp_path / path.name).write_text(NEWER.sub("", path.read_text()))
    command = [
        flag.replace("/etc/torchmem/rules", str(tmp_path)) for flag in flags("vmalert.service")
    ]
    done = subprocess.run([*command, "-dryRun"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.stack
@pytest.mark.skipif(not shutil.which("victoria-metrics"), reason="apt-get install victoria-metrics")
def test_the_store_knows_its_flags() -> None:
    """Each flag of the unit is one of the installed VictoriaMetrics."""
    help_text = subprocess.run(
        ["victoria-metrics", "-help"], capture_output=True, text=True, check=False
    )
    known = set(re.findall(r"^  -([\w.]+)", help_text.stdout + help_text.stderr, re.MULTILINE))

    assert {flag[1:].partition("=")[0] for flag in flags("victoria-metrics.service")[1:]} <= known
