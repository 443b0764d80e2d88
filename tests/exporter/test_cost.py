"""What a scrape costs does not grow unnoticed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.scrape import instructions
from benchmarks.scrape.node import Node
from support.idle_processes import idle_processes

GPUS = RANKS = 8
FLOOR_SERIES = 1_000
RECORDED = 0.386
"""Instructions of a scrape with 8 GPUs and 8 ranks, in those of a scrape of `floor`.

`floor` is prometheus_client's own server with 1,000 gauges. As a ratio, the count hardly depends on
the build of Python. Lower it when the exporter has become cheaper:
`python -m pytest tests/exporter/test_cost.py` prints the new one when it fails.
"""


@pytest.mark.skipif(bool(instructions.missing()), reason=instructions.missing())
def test_a_scrape_takes_no_more_instructions_than_recorded(tmp_path: Path) -> None:
    """With 8 GPUs and 8 ranks, a scrape takes at most a tenth more instructions than recorded."""
    with idle_processes(RANKS) as pids:
        node = Node(tmp_path, GPUS, pids)
        flags = ["--listen", "127.0.0.1:PORT", "--run-dir", str(node.run_dir)]
        flags += instructions.PATIENT_FLAGS
        command = [sys.executable, "-m", "torchmem.cli", "exporter", *flags]
        floor = [sys.executable, "-m", "benchmarks.scrape.floor", "PORT", str(FLOOR_SERIES)]
        environment = node.environment()
        own = instructions.per_scrape(command, environment, node.publish, scrapes=2)
        ratio = own / instructions.per_scrape(floor, environment, scrapes=2)

    assert 0.8 * RECORDED <= ratio <= 1.1 * RECORDED
