"""Prometheus's promtool: it checks files and metrics, and evaluates queries over series."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run promtool; `options` are those of `subprocess.run`."""
    command = ["promtool", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def accepts(*words: str | Path, **options: Any) -> None:
    """Assert that promtool finds nothing wrong."""
    done = run(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def passes(folder: Path, *tests: Mapping[str, Any], **file: Any) -> None:
    """Assert that tests of rules pass. file: other keys of the file of tests."""
    path = folder / "test.yml"
    path.write_text(json.dumps({**file, "tests": tests}))
    accepts("test", "rules", path)


def answers(
    folder: Path, queries: Sequence[str], series: Mapping[str, str], rules: Sequence[str | Path]
) -> list[list[float]]:
    """Return the values of each query after two minutes in which the series do not change.

    promtool expects no series and therefore prints all of them; a label holds the query's number.
    """
    test = {
        "interval": "30s",
        "input_series": [{"series": name, "values": f"{v}x6"} for name, v in series.items()],
        "promql_expr_test": [
            {
                "expr": f'label_replace(({text}), "query", "{number}", "", "")',
                "eval_time": "2m",
                "exp_samples": [],
            }
            for number, text in enumerate(queries)
        ],
    }
    file = {"rule_files": [str(path) for path in rules], "tests": [test]}
    (folder / "test.yml").write_text(json.dumps(file | {"evaluation_interval": "30s"}))
    done = run("test", "rules", "test.yml", cwd=folder)
    output = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in output, output
    found = re.findall(r'\bquery="(\d+)"[^}]*\} ([-+.eE\d]+)', output)
    return [[float(v) for n, v in found if n == str(number)] for number in range(len(queries))]
