"""Rows of tables, evaluated by Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support import promtool
from support.dashboards import QUERIES, filled_in

pytestmark = pytest.mark.stack

INFO, WASTED = "gpu:nvml_short_name:info", "gpu:torchmem_wasted:ratio"
NODE_GPUS = "instance:nvml_gpus:count"


def labels(node: str, short_name: str = "") -> str:
    """Return the labels of the only GPU of a node."""
    name = f',short_name="{short_name}"' if short_name else ""
    return f'{{instance="{node}",gpu="0",uuid="GPU-{node}"{name}}}'


def check(folder: Path, query: str, series: Mapping[str, str], rows: Mapping[str, float]) -> None:
    """Check the result of a query after half an hour: values by labels."""
    expected = [{"labels": each, "value": value} for each, value in rows.items()]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "30m", "exp_samples": expected}],
    }
    promtool.passes(folder, test)


@pytest.mark.parametrize(
    ("selected", "rows"),
    [
        ("a", {labels("a", "#0 H100"): 1}),
        (".*", {labels("a", "a #0 H100"): 1, labels("b", "b #0 H100"): 1}),
        ("idle", {}),
    ],
    ids=["one node", "several nodes", "nothing wasted"],
)
def test_a_wasteful_gpu_is_named(tmp_path: Path, selected: str, rows: dict[str, float]) -> None:
    """A GPU that wastes memory has its name, after that of its node if several are selected."""
    wasted = {"a": "0.5x60", "b": "1x60", "idle": "0x60"}
    series = {f"{WASTED}{labels(node)}": values for node, values in wasted.items()}
    for node in wasted:
        series[f"{INFO}{labels(node, '#0 H100')}"] = "1x60"
        series[f'{NODE_GPUS}{{instance="{node}"}}'] = "8x60"
    query = filled_in(QUERIES["fleet: GPUs that waste most A"], span="20m", instance=selected)

    check(tmp_path, query, series, rows)


def test_a_node_that_went_down_has_no_row(tmp_path: Path) -> None:
    """The energy that a GPU took is in its row, and without a row, it is not shown."""
    name, facts = "nvml_energy_joules_total", 'name="H100",pci_bus_id="1"}'
    series = {f"{name}{labels('a')}": "0+60000x60", f"{name}{labels('gone')}": "0+60000x20 stale"}
    series[f"nvml_gpu_info{labels('a')[:-1]},{facts}"] = "1x60"
    series[f"nvml_gpu_info{labels('gone')[:-1]},{facts}"] = "1x20 stale"
    (query,) = (
        text
        for each, text in QUERIES.items()
        if each.startswith("node: Devices ") and "increase" in text
    )

    check(tmp_path, filled_in(query, span="20m"), series, {labels("a"): 20 / 60})


def test_the_first_error_of_a_stage_is_a_problem(tmp_path: Path) -> None:
    """A stage has no series before its first error; errors before the time range do not count."""
    rank = 'instance="a",rank="0",pid="7",run="gpt"'
    values = {"publish": "_x20 1x40", "otlp": "2x60", "stats": "2x20 5x40"}
    series = {
        f'torchmem_sdk_stage_errors_total{{{rank},stage="{stage}"}}': each
        for stage, each in values.items()
    }
    series['up{job="torchmem",instance="a"}'] = "1x60"
    shown = '{what="SDK error",detail="%s",instance="a",rank="0",run="gpt"}'
    query = filled_in(QUERIES["self: Problems A"], span="20m")

    check(tmp_path, query, series, {shown % "publish": 1, shown % "stats": 3})
