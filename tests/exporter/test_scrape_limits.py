"""The limits of a scrape, which are the same in every configuration that is shipped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import promtool
from support.h100_node import h100_node, series
from support.needs import needs
from support.scrape_limits import MAX_OTHER_SERIES, NODE_LIMITS, RANK_LIMITS

ROOT = Path(__file__).resolve().parents[2]
OTHER_JOBS = {"prometheus", "alertmanager", "vllm"}  # they serve no series of torchmem
UUIDS = [f"GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a9{index}" for index in range(8)]


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the scrape configurations of the repository and of its documentation."""
    for path in (ROOT / "prometheus/prometheus.yml", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        blocks = (
            re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if path.suffix == ".md" else [text]
        )
        for block in blocks:
            if re.search(r"^scrape_configs:", block, re.MULTILINE):
                for job in yaml.safe_load(block)["scrape_configs"]:
                    yield f"{path.name}:{job['job_name']}", job


def monitors() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the PodMonitors, with their limits under the names of Prometheus."""
    for path in sorted((ROOT / "deploy/kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document["kind"] in {"PodMonitor", "ServiceMonitor"}:
                spec = {
                    re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name): value
                    for name, value in document["spec"].items()
                }
                yield path.name, {"job_name": document["metadata"]["name"], **spec}


SHIPPED = {name: job for name, job in (*jobs(), *monitors()) if job["job_name"] not in OTHER_JOBS}


@pytest.mark.parametrize("job", SHIPPED.values(), ids=SHIPPED)
def test_every_configuration_has_the_limits(job: Mapping[str, Any]) -> None:
    """No shipped configuration lets one target fill Prometheus' memory in one scrape."""
    is_of_ranks = job["job_name"] in {"torchmem-ranks", "torchmem-sidecars"}
    limits = RANK_LIMITS if is_of_ranks else NODE_LIMITS
    assert limits == {name: job.get(name) for name in limits}


def test_there_are_configurations() -> None:
    """The configuration, the manifests and the pages are all found."""
    assert {"prometheus.yml:torchmem", "podmonitor.yaml", "exporter.md:torchmem"} <= set(SHIPPED)


@needs("promtool")
@pytest.mark.parametrize("limits", [NODE_LIMITS, RANK_LIMITS])
def test_prometheus_accepts_the_limits(tmp_path: Path, limits: Mapping[str, int | str]) -> None:
    """promtool accepts the limits as part of a scrape configuration."""
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [{"job_name": "torchmem", **limits}]}))
    promtool.accepts("check", "config", file)


def test_a_node_stays_below_the_limits() -> None:
    """A node with eight GPUs and their ranks has a small part of what is left for such series."""
    with h100_node(UUIDS, 8) as node:
        page = node.page(1.0)
    assert series(page) < MAX_OTHER_SERIES // 4
    assert max(line.count('="') for line in page.splitlines()) < int(NODE_LIMITS["label_limit"])
