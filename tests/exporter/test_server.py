"""The exporter over HTTP: what Prometheus, a probe and a person get."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.core import Metric
from support.exposition import Exposition
from support.publishing import own_sample, publish
from support.waiting import until

from torchmem.core.errors import UsageError
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import GpuIdentity, MemoryInfo
from torchmem.exporter.serve import ExporterServer, serve
from torchmem.exporter.server import MAX_CONCURRENT_SCRAPES, Collector
from torchmem.exporter.testing import FakeGpu, FakeNvml

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
Open = Callable[[Collector], httpx.Client]


class Gate:
    """A collector that counts its runs and lets each end only when the gate is open."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = threading.Event()

    def collect(self) -> list[Metric]:
        """Wait, then give nothing."""
        self.runs += 1
        assert self.gate.wait(60)
        return []


@pytest.fixture
def open_client() -> Iterator[Open]:
    """Serves a collector on a free port and gives a client for it."""
    opened: list[tuple[ExporterServer, httpx.Client]] = []

    def open_one(collector: Collector) -> httpx.Client:
        server = serve(collector)
        opened.append((server, httpx.Client(base_url=server.url, trust_env=False, timeout=30)))
        return opened[-1][1]

    yield open_one
    for server, client in opened:
        client.close()
        server.close()


@pytest.fixture
def client(open_exporter: Callable[..., Exporter], open_client: Open, run_dir: Path) -> httpx.Client:
    """A client of an exporter with one rank and one GPU."""
    publish(run_dir, own_sample())
    gpu = FakeGpu(GpuIdentity(0, own_sample().devices[0].uuid or ""), MemoryInfo(80, 60, 19, 1))
    return open_client(open_exporter(FakeNvml.of(gpu)))


def test_both_formats_say_the_same(client: httpx.Client) -> None:
    """Text and OpenMetrics carry the same series; each parses strictly as what its content type says."""
    text = client.get("/metrics")
    openmetrics = client.get("/metrics", headers={"Accept": OPENMETRICS})
    shown, strict = Exposition.of_text(text.text), Exposition.of_openmetrics(openmetrics.text)

    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert set(shown.series) == set(strict.series)
    assert shown.series["torchmem_reserved_bytes"] == strict.series["torchmem_reserved_bytes"]
    assert 1.0 == shown.value("torchmem_process_state", state="running")


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("identity", None)])
def test_compressed_on_request(client: httpx.Client, accepted: str, encoding: str | None) -> None:
    """Prometheus asks for gzip and gets it; who does not ask gets plain text."""
    answer = client.get("/metrics", headers={"Accept-Encoding": accepted})

    assert encoding == answer.headers.get("content-encoding")
    assert "torchmem_reserved_bytes" in answer.text


@pytest.mark.stack
@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not on PATH: apt-get install prometheus")
def test_promtool_finds_nothing(client: httpx.Client) -> None:
    """Names, units and help texts follow Prometheus' rules."""
    lint = subprocess.run(
        ["promtool", "check", "metrics"], input=client.get("/metrics").text, text=True, capture_output=True, check=False
    )

    assert (0, "", "") == (lint.returncode, lint.stdout, lint.stderr)


def test_page_for_people(client: httpx.Client) -> None:
    """The landing page links to everything and loads nothing from elsewhere."""
    answer = client.get("/")

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [200, 200, 200] == [client.get(path).status_code for path in ("/metrics", "/-/healthy", "/-/ready")]
    assert all(f'href="{path}"' in answer.text for path in ("/metrics", "/-/healthy", "/-/ready"))
    assert "http" not in answer.text


def test_unknown_path_is_plain_text(client: httpx.Client) -> None:
    """A wrong path says so without a page."""
    answer = client.get("/metric")

    assert (404, "text/plain; charset=utf-8") == (answer.status_code, answer.headers["content-type"])


def test_ready_after_the_first_collection(open_client: Open) -> None:
    """Readiness needs no scrape, liveness no collection."""
    collector = Gate()
    client = open_client(collector)
    before = client.get("/-/ready").status_code
    alive = client.get("/-/healthy").status_code
    collector.gate.set()

    assert (503, 200) == (before, alive)
    assert 200 == until(lambda: client.get("/-/ready").status_code == 200 and 200)


def test_simultaneous_scrapes_share_one_collection(open_client: Open) -> None:
    """Two Prometheus servers cost one collection; beyond the bound scrapes are turned away at once."""
    collector = Gate()
    client = open_client(collector)
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.get("/metrics").status_code))
        for _ in range(MAX_CONCURRENT_SCRAPES + 4)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(statuses) >= 4)
    collector.gate.set()
    for thread in threads:
        thread.join(60)

    assert 1 == collector.runs
    assert {200, 503} == set(statuses)
    assert MAX_CONCURRENT_SCRAPES >= statuses.count(200) >= MAX_CONCURRENT_SCRAPES - 1


def test_taken_port_is_one_sentence(client: httpx.Client, open_exporter: Callable[..., Exporter]) -> None:
    """The error names the address and the flag that changes it."""
    port = client.base_url.port or 0

    with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port} .*--listen"):
        serve(open_exporter(), port=port)


def test_close_does_not_wait_for_a_stuck_scrape(open_client: Open) -> None:
    """A server whose collection hangs is closed all the same, and its port is free again."""
    collector = Gate()
    server = serve(collector)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        client.get("/-/healthy")
    server.close()
    again = serve(collector, port=int(server.url.rsplit(":", 1)[1]))
    collector.gate.set()
    again.close()

    assert again.stopped.wait(30)
    assert server.stopped.wait(30)
