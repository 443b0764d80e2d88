"""`torchmem manifests rules` reads thresholds strictly and renders rules that apply them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from support import promtool
from support.promql import ROOT

from torchmem.explain.chosen_thresholds import chosen as load
from torchmem.explain.thresholds import Limits, changed, defaults, defaults_text, scope
from torchmem.manifests.render import render, templates
from torchmem.sample.errors import UsageError
from torchmem.sample.xids import APPLICATION_XIDS

COMMAND = [sys.executable, "-m", "torchmem.cli", "manifests", "rules"]


def rules(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `torchmem manifests rules`."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The thresholds file of a test."""
    return tmp_path / "thresholds.yml"


def test_the_printed_defaults_render_the_shipped_rules(file: Path) -> None:
    """prometheus/rules is what the thresholds that --defaults prints render to."""
    file.write_text(rules("--defaults").stdout)
    checked = rules("--thresholds", file, "--check", ROOT / "prometheus" / "rules")

    assert (checked.returncode, checked.stderr) == (0, "")


def test_ignored_xids_are_those_of_applications() -> None:
    """The shipped list of ignored XIDs is the one in the table of XIDs."""
    shipped = yaml.safe_load(defaults_text())["gpu_ignored_xids"]

    assert shipped == list(APPLICATION_XIDS)


def test_the_shipped_file_is_yaml() -> None:
    """Without a YAML parser, the shipped thresholds are read as YAML has them."""
    content = yaml.safe_load(defaults_text())

    assert changed(content, "the shipped file") == defaults()
    assert len(content) == len(defaults().values) + len(["overrides"])


def test_a_threshold_without_a_known_suffix_is_told() -> None:
    """Who adds a threshold learns which suffixes say what its value is."""
    with pytest.raises(UsageError, match=r"stranded_limit has no known suffix: use _ratio, _bytes"):
        scope("stranded_limit")


def test_every_threshold_is_used() -> None:
    """Every threshold in the file has an effect: on the rules, or on the judgment of a rank."""
    used = {name for _, text in templates() for name in re.findall(r"\[\[(\w+)\]\]", text)}
    judged = {field.name for field in fields(Limits)}
    links = {"runbooks_at", "dashboards_at"}

    assert set(defaults().values) == (used & set(defaults().values)) | judged | links


def test_the_file_says_where_a_threshold_takes_effect() -> None:
    """Exactly the thresholds of the judgment are marked so, and those in the rules as well."""
    comments = re.findall(r"((?:^#.*\n)+)^(\w+):", defaults_text(), re.MULTILINE)
    marked = {name: text for text, name in comments if "(judgment" in text}
    used = {name for _, text in templates() for name in re.findall(r"\[\[(\w+)\]\]", text)}

    assert set(marked) == {field.name for field in fields(Limits)}
    assert {name for name, text in marked.items() if "and in the rules" in text} == used & set(
        marked
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fragmentation_ration: 0.8", "did you mean 'fragmentation_ratio'"),
        ("nonsense: 1", "torchmem manifests rules --defaults"),
        ("fragmentation_ratio: 80", "a ratio between 0 and 1"),
        ("fragmentation_ratio: true", "a ratio between 0 and 1"),
        ("fragmentation_ratio: .nan", "a ratio between 0 and 1"),
        ("stranded_bytes: 1 banana", "a size such as 1GiB"),
        ("fragmentation_for: 60", "a duration such as 30s"),
        ("fragmentation_for: 1.5m", "a duration such as 30s"),
        ("gpu_ignored_xids: 13", "a list of numbers"),
        ('exporter_job: a"b', "without spaces and quotes"),
        ("- a", "`key: value` lines"),
        ("stranded_bytes: 1\nstranded_bytes: 2", "duplicate key 'stranded_bytes'"),
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
        ("overrides: [{match: {run: a}, fragmentation_for: 5m}]", "the same for every run"),
        ("overrides: [{match: {run: a}, gpu_throttled_ratio: 0.5}]", "match instance"),
    ],
)
def test_an_invalid_file_is_one_error(text: str, sentence: str, file: Path, tmp_path: Path) -> None:
    """The error names the file, what is wrong, and what to write instead."""
    file.write_text(text)

    with pytest.raises(UsageError, match=re.escape(sentence)) as error:
        load(file)
    assert str(file) in str(error.value)
    assert str(error.value).endswith((".", "?"))


def test_an_invalid_file_exits_with_2(file: Path, tmp_path: Path) -> None:
    """An invalid or missing file, or a missing flag, exits with 2 and writes nothing."""
    file.write_text("fragmentation_ration: 0.8")
    done = rules("--thresholds", file, "--out", tmp_path / "rules")

    assert done.returncode == 2
    assert "did you mean 'fragmentation_ratio'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "rules").exists()
    assert (
        rules("--thresholds", tmp_path / "missing.yml", "--out", tmp_path / "rules").returncode == 2
    )
    assert rules().returncode == 2


def test_other_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    """Rendering removes files of an older rendering and nothing else; --check finds changes."""
    first, other, old = tmp_path / "alerts-memory.yml", tmp_path / "mine.yml", tmp_path / "old.yml"
    assert rules("--out", tmp_path).returncode == 0
    other.write_text("groups: []\n")
    old.write_text(first.read_text())
    assert rules("--check", tmp_path).returncode == 1

    assert rules("--out", tmp_path).returncode == 0
    assert other.exists()
    assert not old.exists()
    assert rules("--check", tmp_path).returncode == 0


def test_one_file_has_the_rules_of_all(tmp_path: Path) -> None:
    """With a .yml file as --out, it has the groups of all files, and --check reads it."""
    assert rules("--out", tmp_path / "rules").returncode == 0
    assert rules("--out", tmp_path / "one" / "torchmem.yml").returncode == 0
    groups = yaml.safe_load((tmp_path / "one" / "torchmem.yml").read_text())["groups"]

    assert groups == [
        group
        for path in sorted((tmp_path / "rules").iterdir())
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert rules("--check", tmp_path / "one" / "torchmem.yml").returncode == 0


def test_a_prometheus_rule_has_links_that_open(file: Path, tmp_path: Path) -> None:
    """With --prometheus-rule, the file is an object of the operator, and a link is a whole URL."""
    file.write_text("dashboards_at: https://grafana.example.org\n")
    place = tmp_path / "one" / "rules.yaml"
    flags = ("--prometheus-rule", "monitoring", "--thresholds", file)
    assert rules("--out", tmp_path / "rules").returncode == 0
    assert rules(*flags, "--out", place).returncode == 0
    rule = yaml.safe_load(place.read_text())

    assert (rule["kind"], rule["metadata"]["namespace"]) == ("PrometheusRule", "monitoring")
    names = {
        name
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        for name in each.get("annotations", {})
    }
    assert names == {"summary", "description", "dashboard_url"}
    assert "dashboard_url: https://grafana.example.org/d/torchmem-self" in place.read_text()
    assert len(rule["spec"]["groups"]) == sum(
        len(yaml.safe_load(path.read_text())["groups"]) for path in (tmp_path / "rules").iterdir()
    )
    assert rules(*flags, "--check", place).returncode == 0


def test_a_prometheus_rule_is_one_file(tmp_path: Path) -> None:
    """A folder as --out is refused, before anything is written."""
    refused = rules("--prometheus-rule", "monitoring", "--out", tmp_path)

    assert (refused.returncode, list(tmp_path.iterdir())) == (2, [])
    assert refused.stderr == (
        "torchmem: --prometheus-rule writes one file: give --out a name that ends in .yml.\n"
    )


def test_one_file_leaves_its_neighbors_alone(tmp_path: Path) -> None:
    """Writing or checking one file does not concern other rendered files of the folder."""
    assert rules("--out", tmp_path).returncode == 0
    before = sorted(tmp_path.iterdir())
    assert rules("--out", tmp_path / "torchmem.yml").returncode == 0

    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "torchmem.yml"])
    assert rules("--check", tmp_path / "torchmem.yml").returncode == 0


def test_a_file_that_is_not_rendered_is_kept(tmp_path: Path) -> None:
    """A file of the user with the name of a rules file is replaced only with --force."""
    mine = tmp_path / "alerts-memory.yml"
    mine.write_text("groups: []\n")
    refused = rules("--out", tmp_path)

    assert refused.returncode == 2
    assert refused.stderr == (
        f"torchmem: alerts-memory.yml in {tmp_path} would be replaced, and `torchmem manifests "
        "rules` did not write it: add --force, or give another --out.\n"
    )
    assert list(tmp_path.iterdir()) == [mine]
    assert rules("--out", tmp_path, "--force").returncode == 0
    assert rules("--check", tmp_path).returncode == 0


def test_rules_contain_the_values_and_urls(file: Path) -> None:
    """A threshold, a duration, a size and the links appear in the rendered rules."""
    file.write_text(
        "critical_stranded_ratio: 0.85\n"
        "outside_growth_bytes: 2GiB\n"
        "exporter_down_for: 5m\n"
        "exporter_job: gpus\n"
        "runbooks_at: https://wiki.example.org/runbooks\n"
        "dashboards_at: https://grafana.example.org\n"
    )
    texts = render(load(file))

    assert "rank:torchmem_stranded_bytes:ratio > 0.85" in texts["alerts-memory.yml"]
    assert "> 2147483648" in texts["alerts-memory.yml"]
    rule = yaml.safe_load(texts["alerts-monitoring.yml"])["groups"][0]["rules"][0]
    assert rule["expr"].startswith('up{job="gpus"} == 0')
    assert rule["for"] == "5m"
    down = rule["annotations"]
    assert down["runbook_url"] == "https://wiki.example.org/runbooks/TorchmemExporterDown.md"
    assert down["dashboard_url"].startswith("https://grafana.example.org/d/")


OVERRIDES = """
overrides:
  - match: {run: "llm-.*"}
    retries_per_minute: 100
  - match: {run: "llm-special"}
    retries_per_minute: 0.1
  - match: {instance: "hot-.*"}
    gpu_throttled_ratio: 0.9
"""


def _rank(run: str, retries: int) -> dict[str, str]:
    """Return series of a rank that retries so often between two scrapes."""
    process = f'job="torchmem",instance="n:9847",rank="0",pid="7",run="{run}"'
    return {
        f'torchmem_alloc_retries_total{{{process},uuid="GPU-{run}"}}': f"0+{retries}x40",
        f'torchmem_process_state{{{process},state="running"}}': "1x40",
    }


def _hot_gpu(instance: str) -> dict[str, str]:
    """Return series of a GPU that is throttled most of the time."""
    target = f'job="torchmem",instance="{instance}"'
    reason = 'reason="hw_thermal_slowdown"'
    return {
        f"up{{{target}}}": "1x40",
        f'nvml_throttle_active{{{target},gpu="0",uuid="GPU-{instance}",{reason}}}': (
            "0 1x2 0 1x2 0 1x2 0 1x2 0 1x2 0 1x2 0 1x2 0 1x18"
        ),
    }


def _firing(alert: str, label: str, time: str, *values: str) -> dict[str, object]:
    """Return a promtool test: at `time`, the alert fires for these values of the label, only."""
    return {
        "expr": f"count by ({label}) (ALERTS{{alertname='{alert}',alertstate='firing'}})",
        "eval_time": time,
        "exp_samples": [{"labels": f'{{{label}="{value}"}}', "value": 1} for value in values],
    }


@pytest.mark.stack
def test_an_override_applies_to_its_runs_only(file: Path, tmp_path: Path) -> None:
    """The first matching override applies; runs without an override have the default."""
    file.write_text(OVERRIDES)
    assert rules("--thresholds", file, "--out", tmp_path / "rules").returncode == 0
    retries = {"llm-a": 1, "llm-special": 1, "llm-b": 50, "gpt": 1, "x-llm-a": 1}
    series = _hot_gpu("hot-1") | _hot_gpu("cold")
    for run, number in retries.items():
        series |= _rank(run, number)
    path = tmp_path / "test.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(tmp_path / "rules" / "*.yml")],
                "evaluation_interval": "15s",
                "group_eval_order": ["torchmem_memory", "torchmem_breakdown"],
                "tests": [
                    {
                        "interval": "15s",
                        "input_series": [
                            {"series": name, "values": values} for name, values in series.items()
                        ],
                        "promql_expr_test": [
                            _firing("TorchmemRetryStorm", "run", "9m", "gpt", "llm-b", "x-llm-a"),
                            _firing("TorchmemGpuThrottled", "instance", "9m", "cold"),
                        ],
                    }
                ],
            }
        )
    )
    promtool.accepts("test", "rules", path)


@pytest.mark.stack
def test_rules_with_all_overrides_are_valid(file: Path, tmp_path: Path) -> None:
    """With an override of every threshold that allows one, Prometheus loads the rules."""
    shipped = yaml.safe_load(defaults_text())
    by_label = {
        label: {name: shipped[name] for name in defaults().values if scope(name) == label}
        for label in ("run", "instance")
    }
    file.write_text(
        yaml.safe_dump(
            {
                "overrides": [
                    {"match": {label: "a.*"}, **values} for label, values in by_label.items()
                ]
            }
        )
    )
    assert rules("--thresholds", file, "--out", tmp_path / "rules").returncode == 0
    paths = sorted(map(str, (tmp_path / "rules").glob("*.yml")))
    promtool.accepts("check", "rules", *paths)
    assert len(by_label["run"]) > 15
