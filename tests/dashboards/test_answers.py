"""Values that the driver reports for a node reach the dashboard "GPU node" through Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.dashboards import QUERIES, filled_in
from support.golden_scrapes import GOLDEN
from support.scrape_target import serving
from support.stack import Prometheus, prometheus
from support.waiting import until

# Together, these nodes report everything: NVLink and GPM, MIG instances, fans, retired pages.
NODES = ("h100_busy", "mig", "rtx_4090", "v100_old_driver")
# NVML or a running rank tells what is free on all nodes, no row failed, counters of recorded
# scrapes do not rise, and all processes live and are on their own GPUs.
NOT_REPORTED = {
    "Held for nothing A",
    "Memory of the selected GPUs J",
    "Memory of the selected GPUs L",
    "Nodes by driver B",
    "Remapped rows and retired pages C",
    "NVLink errors per minute A",
    "PCIe replays per minute A",
}


@pytest.fixture
def node_prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes all of the nodes."""
    with ExitStack() as stack:
        targets = [
            stack.enter_context(serving((GOLDEN / f"{name}.metrics").read_text)) for name in NODES
        ]
        server = stack.enter_context(prometheus(tmp_path, targets[0]))
        (tmp_path / "prometheus" / "targets" / "exporters.yml").write_text(
            json.dumps([{"targets": targets}])
        )
        yield server


@pytest.mark.stack
def test_gpu_node_shows_everything_that_the_driver_reports(node_prometheus: Prometheus) -> None:
    """No query of the dashboard is empty, except for the metrics that these nodes do not report."""
    # The band of all GPUs is drawn only for many of them.
    queries = {
        name.partition(": ")[2]: text
        for name, text in QUERIES.items()
        if name.startswith("node: ") and " and count(" not in text
    }

    def empty() -> set[str]:
        return {
            name
            for name, text in queries.items()
            if not node_prometheus.query(filled_in(text, span="1m"))
        }

    until(lambda: empty() <= NOT_REPORTED, pause=1)
    assert empty() == NOT_REPORTED
