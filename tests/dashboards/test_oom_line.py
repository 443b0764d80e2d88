"""The line of the script on the dashboard "After an OOM"."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import promtool
from support.dashboards import QUERIES, filled_in

INFO = "torchmem_last_oom_info"
LABELS = 'instance="n:9847",gpu="3",uuid="GPU-a",rank="3",pid="9",run="gpt"'


@pytest.mark.stack
def test_of_several_errors_the_newest_line_is_shown(tmp_path: Path) -> None:
    """A rank that failed at two lines has one row, with the line of the newest error."""
    (query,) = (text for text in QUERIES.values() if INFO in text and "remedy, line)" in text)
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'{INFO}{{{LABELS},line="train.py:7"}}', "values": "1x5 stale"},
            {"series": f'{INFO}{{{LABELS},line="train.py:5"}}', "values": "_x5 1x9 stale"},
        ],
        "promql_expr_test": [
            {
                "expr": filled_in(query, span="1h"),
                "eval_time": "30m",
                "exp_samples": [{"labels": f'{{{LABELS},line="train.py:5"}}', "value": 840}],
            }
        ],
    }
    promtool.passes(tmp_path, test)
