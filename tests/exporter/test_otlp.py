"""The exporter sends by OTLP, to a receiver and through a real collector."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.exporter_process import exporter_process
from support.fake_nvml import FakeNode
from support.otlp import Received, receiver, variables
from support.publishing import own_process, own_sample, publish
from support.stack import free_port, running
from support.waiting import until

from torchmem.host.procfs import own_start_ticks
from torchmem.metrics.catalog import CATALOG

# Absent when the previous collection was a moment ago.
AVERAGES = {spec.name for spec in CATALOG.values() if "since the previous scrape" in spec.help}
UUID = "GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a90"


@pytest.fixture(scope="module")
def from_node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Received, dict[str, Any]]:
    """What an exporter with eight H100 and one rank sends, and its last scrape by name."""
    folder = tmp_path_factory.mktemp("otlp")
    publish(folder / "run", own_sample(uuid=UUID))
    environment = variables("") | {"OTEL_RESOURCE_ATTRIBUTES": "k8s.node.name=gpu-7"}
    with receiver() as received:
        environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": received.url}
        node = FakeNode(folder / "node", "h100_busy")
        with exporter_process(node, folder / "run", environment, otlp=True) as process:
            until(lambda: len(received.requests) > 1)
            return received, process.scrape().series


def test_the_exporter_sends_its_scrape(from_node: tuple[Received, dict[str, Any]]) -> None:
    """Every series of the page is sent under the same name, and no others."""
    received, page = from_node
    sent = {name for name, _ in received.series()}

    assert page.keys() - AVERAGES <= sent
    assert sent - page.keys() <= AVERAGES


def test_the_resource_is_the_node(from_node: tuple[Received, dict[str, Any]]) -> None:
    """The service is torchmem on this host; OTEL_RESOURCE_ATTRIBUTES adds and overrides."""
    received, _ = from_node
    attributes = received.resource

    assert attributes["service.name"] == "torchmem"
    assert attributes["service.instance.id"] == attributes["host.name"]
    assert attributes["k8s.node.name"] == "gpu-7"


def test_counters_of_a_rank_start_with_its_process(
    from_node: tuple[Received, dict[str, Any]],
) -> None:
    """The start of a rank's counters is the start of its process, before the exporter's own."""
    received, _ = from_node
    assert own_start_ticks() is not None
    (rank,) = received.points("torchmem_steps_total")
    own = received.points("torchmem_exporter_rejected_samples_total")

    assert rank.start_time_unix_nano < min(point.start_time_unix_nano for point in own)


@contextmanager
def collector(folder: Path, target: str) -> Iterator[str]:
    """Run the collector Rotel, which sends what it receives to `target`; yield its URL."""
    program = Path(find_spec("rotel").origin or "").parent / "rotel-agent"  # type: ignore[union-attr]
    http, grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [
        str(program),
        "start",
        f"--otlp-http-endpoint={http}",
        f"--otlp-grpc-endpoint={grpc}",
        "--exporter=otlp",
        "--otlp-exporter-protocol=http",
        f"--otlp-exporter-endpoint={target}",
    ]
    with running(command, folder / "rotel.log"):
        yield f"http://{http}"


@pytest.mark.skipif(find_spec("rotel") is None, reason="needs a collector: pip install rotel")
def test_a_real_collector_understands_it(tmp_path: Path) -> None:
    """What a collector passes on is what the exporter serves."""
    publish(tmp_path / "run", own_sample(process=own_process(rank=3)))
    node = FakeNode(tmp_path / "node", "h100_busy")
    with (
        receiver() as received,
        collector(tmp_path, received.url) as url,
        exporter_process(node, tmp_path / "run", variables(url, 3600), otlp=True) as process,
    ):
        until(lambda: received.requests, 60)
        page = process.scrape().series

    assert page.keys() - AVERAGES <= {name for name, _ in received.series()}
    assert "3" in received.values("torchmem_steps_total", "rank")


def test_without_the_extra(tmp_path: Path) -> None:
    """The exporter says what to install, with exit code 2."""
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys; sys.modules['opentelemetry.context'] = None\n")
    flags = ["--otlp", "--listen", "127.0.0.1:0", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "torchmem.cli", "exporter", *flags],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "pip install 'torchmem[otlp]'" in done.stderr


def test_an_outage_of_the_collector_is_logged_at_its_ends(tmp_path: Path) -> None:
    """While the collector is away the log has one line, and one when it is back."""
    with receiver() as received:
        received.refuses = True
        node = FakeNode(tmp_path / "node", "h100_busy")
        environment = variables(received.url)
        with exporter_process(node, tmp_path / "run", environment, otlp=True) as process:
            until(lambda: len(received.requests) > 3)
            received.refuses = False
            until(lambda: "sent by OTLP again" in process.messages)
            lines = [line for line in process.messages.splitlines() if "OTLP" in line]

    assert [line.split()[2] for line in lines] == ["WARNING", "INFO"]
    assert "403" in lines[0]
