"""`torchmem rules`: thresholds are read strictly, and what is rendered applies them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.promql import ROOT

from torchmem.rules.render import render, templates
from torchmem.rules.thresholds import defaults, defaults_text, load
from torchmem.sample.errors import UsageError

COMMAND = [sys.executable, "-m", "torchmem.cli", "rules"]


def rules(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `torchmem rules`."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test writes its thresholds."""
    return tmp_path / "thresholds.yml"


def test_the_shipped_rules_are_what_the_shipped_thresholds_give() -> None:
    """prometheus/rules is rendered from prometheus/thresholds.yml, which is the file in the package."""
    checked = rules(
        "--thresholds",
        ROOT / "prometheus" / "thresholds.yml",
        "--check",
        ROOT / "prometheus" / "rules",
    )

    assert (0, "") == (checked.returncode, checked.stderr)
    assert (
        (ROOT / "prometheus" / "thresholds.yml").read_text()
        == rules("--defaults").stdout
        == defaults_text()
    )


def test_every_threshold_is_used() -> None:
    """No threshold in the file is without effect."""
    used = {name for _, text in templates() for name in re.findall(r"\[\[(\w+)\]\]", text)}
    links = {"runbooks_at", "dashboards_at"}

    assert set(defaults().values) == (used & set(defaults().values)) | links


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fragmentation_ration: 0.8", "did you mean 'fragmentation_ratio'"),
        ("nonsense: 1", "torchmem rules --defaults"),
        ("fragmentation_ratio: 80", "a share between 0 and 1"),
        ("fragmentation_ratio: true", "a share between 0 and 1"),
        ("fragmentation_ratio: .nan", "a share between 0 and 1"),
        ("stranded_bytes: 1 banana", "a size such as 1GiB"),
        ("fragmentation_for: 60", "a duration such as 30s"),
        ("fragmentation_for: 1.5m", "a duration such as 30s"),
        ("gpu_ignored_xids: 13", "a list of numbers"),
        ('exporter_job: a"b', "without spaces and quotes"),
        ("- a", "`key: value` lines"),
        ("stranded_bytes: 1\nstranded_bytes: 2", "Duplicate key 'stranded_bytes'"),
        ("a: [", "not valid YAML at line"),
        ("overrides: 3", "give a list"),
        ("overrides: [{fragmentation_ratio: 0.8}]", "has no `match`"),
        ("overrides: [{match: {host: a}}]", "match run, or instance"),
        ("overrides: [{match: {run: '('}, fragmentation_ratio: 0.8}]", "regular expression"),
        ("overrides: [{match: {run: '(?=a)'}, fragmentation_ratio: 0.8}]", "RE2"),
        (
            "overrides: [{match: {run: a}, fragmentation_rato: 0.8}]",
            "did you mean 'fragmentation_ratio'",
        ),
        ("overrides: [{match: {run: a}, fragmentation_ratio: 8}]", "override 1 of"),
        ("overrides: [{match: {run: a}, fragmentation_for: 5m}]", "the same everywhere"),
        ("overrides: [{match: {run: a}, gpu_throttled_ratio: 0.5}]", "match instance"),
    ],
)
def test_a_mistake_is_one_sentence(text: str, sentence: str, file: Path, tmp_path: Path) -> None:
    """What is wrong, where, and what to write instead; nothing is rendered."""
    file.write_text(text)

    with pytest.raises(UsageError, match=re.escape(sentence)) as error:
        load(file)
    assert str(file) in str(error.value)
    assert str(error.value).endswith((".", "?"))


def test_a_mistake_ends_the_command_with_code_2(file: Path, tmp_path: Path) -> None:
    """And no file is written."""
    file.write_text("fragmentation_ration: 0.8")
    done = rules("--thresholds", file, "--out", tmp_path / "rules")

    assert 2 == done.returncode
    assert "did you mean 'fragmentation_ratio'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "rules").exists()
    assert (
        2 == rules("--thresholds", tmp_path / "missing.yml", "--out", tmp_path / "rules").returncode
    )
    assert 2 == rules().returncode


def test_own_files_in_the_folder_stay(tmp_path: Path) -> None:
    """Rendering again removes what an older rendering left, and nothing else; a changed file is found."""
    first, own, left = tmp_path / "alerts-memory.yml", tmp_path / "mine.yml", tmp_path / "old.yml"
    assert 0 == rules("--out", tmp_path).returncode
    own.write_text("groups: []\n")
    left.write_text(first.read_text())
    assert 1 == rules("--check", tmp_path).returncode

    assert 0 == rules("--out", tmp_path).returncode
    assert own.exists()
    assert not left.exists()
    assert 0 == rules("--check", tmp_path).returncode


def test_numbers_and_addresses_reach_the_rules(file: Path) -> None:
    """A threshold, a duration, a size and the links appear where they belong."""
    file.write_text(
        "fragmentation_ratio: 0.85\nstranded_bytes: 2GiB\nexporter_down_for: 5m\nexporter_job: gpus\n"
        "runbooks_at: https://wiki.example.org/runbooks\ndashboards_at: https://grafana.example.org\n"
    )
    texts = render(load(file))

    assert "torchmem_fragmentation_ratio > 0.85" in texts["alerts-memory.yml"]
    assert 'torchmem_free_bytes{state="stranded"} > 2147483648' in texts["alerts-memory.yml"]
    assert 'up{job="gpus"} == 0\n        for: 5m' in texts["alerts-monitoring.yml"]
    down = yaml.safe_load(texts["alerts-monitoring.yml"])["groups"][0]["rules"][0]["annotations"]
    assert "https://wiki.example.org/runbooks/TorchmemExporterDown.md" == down["runbook_url"]
    assert down["dashboard_url"].startswith("https://grafana.example.org/d/")


OVERRIDES = """
overrides:
  - match: {run: "llm-.*"}
    fragmentation_ratio: 0.9
    retries_per_minute: 100
  - match: {run: "llm-special"}
    fragmentation_ratio: 0.1
  - match: {instance: "hot-.*"}
    gpu_throttled_ratio: 0.9
"""


def _rank(run: str) -> str:
    return f'job="torchmem",instance="n:9847",uuid="GPU-{run}",rank="0",pid="7",run="{run}"'


def _throttled(host: str) -> str:
    return (
        f'job="torchmem",instance="{host}",gpu="0",uuid="GPU-{host}",reason="hw_thermal_slowdown"'
    )


@pytest.mark.stack
def test_an_override_applies_to_its_runs_and_the_default_to_all_others(
    file: Path, tmp_path: Path
) -> None:
    """In the real rule engine: the first override that matches decides, and a run without one has the default."""
    file.write_text(OVERRIDES)
    assert 0 == rules("--thresholds", file, "--out", tmp_path / "rules").returncode
    series = [
        {"series": series, "values": values}
        for run, ratio in (("llm-a", 0.85), ("llm-special", 0.85), ("llm-b", 0.95), ("gpt", 0.85), ("x-llm-a", 0.85))
        for series, values in (
            (f"torchmem_fragmentation_ratio{{{_rank(run)}}}", f"{ratio}x40"),
            (f'torchmem_free_bytes{{{_rank(run)},state="stranded"}}', "8589934592x40"),
            (f"torchmem_device_total_bytes{{{_rank(run)}}}", "85899345920x40"),
            (f"torchmem_alloc_retries_total{{{_rank(run)}}}", "0+1x40"),
            (f'torchmem_process_state{{job="torchmem",instance="n:9847",rank="0",pid="7",run="{run}",state="running"}}',
             "1x40"),
        )
    ] + [
        {"series": series, "values": "1x40" if name == "up" else "0 1x2 0 1x2 0 1x2 0 1x2 0 1x2 0 1x2 0 1x2 0 1x18"}
        for host in ("hot-1", "cold")
        for name, series in (
            ("up", f'up{{job="torchmem",instance="{host}"}}'),
            (
                "throttle",
                f"nvml_throttle_active{{{_throttled(host)}}}",
            ),
        )
    ]  # fmt: skip
    test = {
        "rule_files": [str(tmp_path / "rules" / "*.yml")],
        "evaluation_interval": "15s",
        "group_eval_order": ["torchmem_memory"],
        "tests": [{
            "interval": "15s",
            "input_series": series,
            "promql_expr_test": [
                {"expr": f"count by ({label}) (ALERTS{{alertname='{alert}',alertstate='firing'}})", "eval_time": time,
                 "exp_samples": [{"labels": f'{{{label}="{value}"}}', "value": 1} for value in values]}
                for alert, label, time, values in (
                    ("TorchmemFragmentationHigh", "run", "3m", ("gpt", "llm-b", "x-llm-a")),
                    ("TorchmemRetryStorm", "run", "9m", ("gpt", "x-llm-a")),
                    ("TorchmemGpuThrottled", "instance", "9m", ("cold",)),
                )
            ],
        }],
    }  # fmt: skip
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test))
    tested = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )

    assert 0 == tested.returncode, tested.stdout + tested.stderr


@pytest.mark.stack
def test_every_threshold_that_can_be_overridden_still_parses(file: Path, tmp_path: Path) -> None:
    """With an override for each of them, Prometheus loads the rules."""
    from torchmem.rules.thresholds import scope

    shipped = yaml.safe_load(defaults_text())
    by = {
        label: {name: shipped[name] for name in defaults().values if scope(name) == label}
        for label in ("run", "instance")
    }
    file.write_text(
        yaml.safe_dump(
            {"overrides": [{"match": {label: "a.*"}, **values} for label, values in by.items()]}
        )
    )
    assert 0 == rules("--thresholds", file, "--out", tmp_path / "rules").returncode
    paths = sorted(map(str, (tmp_path / "rules").glob("*.yml")))
    checked = subprocess.run(
        ["promtool", "check", "rules", *paths], capture_output=True, text=True, check=False
    )

    assert 0 == checked.returncode, checked.stdout + checked.stderr
    assert len(by["run"]) > 15
