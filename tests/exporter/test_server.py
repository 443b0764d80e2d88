"""The exporter over HTTP: what Prometheus, a probe and a person get."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.core import Metric
from support.exposition import Exposition
from support.publishing import own_sample, publish
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.run_directory import Published
from torchmem.exporter.scrapes import (
    MAX_CONCURRENT_SCRAPES_PER_CLIENT,
    OPENMETRICS,
    TEXT,
    Collector,
    Format,
    accepts_gzip,
    answer_seconds,
    choose_format,
)
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.exporter.values import MemoryInfo
from torchmem.exporter.web.connections import Connections, Limits
from torchmem.sample.errors import UsageError

OPENMETRICS_ACCEPT = "application/openmetrics-text;version=1.0.0"
Open = Callable[[Collector], httpx.Client]


class Gate:
    """A collector that counts its runs and lets each end only when the gate is open."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = threading.Event()

    def collect(self) -> list[Metric]:
        """Wait, then give nothing."""
        self.runs += 1
        assert self.gate.wait(120)
        return []

    def known(self) -> list[Metric]:
        """One family, whose name tells that the collection was not waited for."""
        return [Metric("known_so_far", "", "gauge")]

    def published(self) -> list[Published]:
        """No process."""
        return []


@pytest.fixture
def open_client() -> Iterator[Open]:
    """Serves a collector on a free port and gives a client for it."""
    opened: list[tuple[ExporterServer, httpx.Client]] = []

    def open_one(collector: Collector) -> httpx.Client:
        server = serve(collector)
        opened.append((server, httpx.Client(base_url=server.url, trust_env=False, timeout=120)))
        return opened[-1][1]

    yield open_one
    for server, client in opened:
        client.close()
        server.close()


@pytest.fixture
def client(
    open_exporter: Callable[..., Exporter], open_client: Open, run_dir: Path
) -> httpx.Client:
    """A client of an exporter with one rank and one GPU."""
    publish(run_dir, own_sample())
    gpu = FakeGpu(GpuIdentity(0, own_sample().devices[0].uuid or ""), MemoryInfo(80, 60, 19, 1))
    return open_client(open_exporter(FakeNvml.of(gpu)))


def test_both_formats_say_the_same(client: httpx.Client) -> None:
    """Text and OpenMetrics carry the same series; each parses strictly as what its content type says."""
    text = client.get("/metrics")
    openmetrics = client.get("/metrics", headers={"Accept": OPENMETRICS_ACCEPT})
    shown, strict = Exposition.of_text(text.text), Exposition.of_openmetrics(openmetrics.text)

    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert openmetrics.headers["content-type"].startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    assert set(shown.series) == set(strict.series)
    assert shown.series["torchmem_reserved_bytes"] == strict.series["torchmem_reserved_bytes"]
    assert 1.0 == shown.value("torchmem_process_state", state="running")


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("identity", None)])
def test_compressed_on_request(client: httpx.Client, accepted: str, encoding: str | None) -> None:
    """Prometheus asks for gzip and gets it; who does not ask gets plain text."""
    answer = client.get("/metrics", headers={"Accept-Encoding": accepted})

    assert encoding == answer.headers.get("content-encoding")
    assert "torchmem_reserved_bytes" in answer.text


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip;q=0", False), ("gzip;q=0.001", True), ("*", True), ("*;q=0", False), ("deflate, GZIP ;q=1.0", True),
        ("identity;q=1, *;q=0", False), ("gzip;q=0, *", False), ("gzip;q=x", False), ("br", False), ("", False),
        (",".join(["br"] * 500), False),
    ],
)  # fmt: skip
def test_weight_of_gzip(accepted: str, compressed: bool) -> None:
    """`q=0` forbids, `*` stands for what is not named, rubbish asks for nothing."""
    assert compressed is accepts_gzip(accepted)


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", TEXT), ("*/*", TEXT), ("text/html, */*;q=0.8", TEXT), ("application/openmetrics-text", OPENMETRICS),
        (PROMETHEUS_2, OPENMETRICS), (OPENMETRICS_ACCEPT + ";q=0", TEXT), ("application/json", TEXT),
        ('application/openmetrics-text; version="1.0.0"; charset=utf-8', OPENMETRICS),
        ("application/openmetrics-text;version=2.0.0, text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        (OPENMETRICS_ACCEPT + ";q=0.3,text/plain;version=0.0.4;q=0.9", TEXT), ("a;;==,;q=,,", TEXT),
    ],
)  # fmt: skip
def test_format_that_the_client_prefers(accepted: str, chosen: Format) -> None:
    """OpenMetrics 1.0.0 for who prefers it, text for everyone else, whatever the header says."""
    assert chosen is choose_format(accepted)


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_openmetrics_ends_with_its_mark(client: httpx.Client, encoding: str) -> None:
    """A cut exposition would lack `# EOF`; the whole one ends with it, and caches are told what it depends on."""
    answer = client.get(
        "/metrics", headers={"Accept": OPENMETRICS_ACCEPT, "Accept-Encoding": encoding}
    )

    assert answer.text.endswith("\n# EOF\n")
    assert "Accept, Accept-Encoding" == answer.headers["vary"]
    assert len(answer.content) > 1000


@pytest.mark.stack
@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not on PATH: apt-get install prometheus"
)
def test_promtool_finds_nothing(client: httpx.Client) -> None:
    """Names, units and help texts follow Prometheus' rules."""
    lint = subprocess.run(
        ["promtool", "check", "metrics"],
        input=client.get("/metrics").text,
        text=True,
        capture_output=True,
        check=False,
    )

    assert (0, "", "") == (lint.returncode, lint.stdout, lint.stderr)


def test_page_for_people(client: httpx.Client) -> None:
    """The landing page links to everything and loads nothing from elsewhere."""
    answer = client.get("/")

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    paths = ("/metrics", "/sd", "/-/healthy", "/-/ready")
    assert [200] * 4 == [client.get(path).status_code for path in paths]
    assert all(f'href="{path}"' in answer.text for path in paths)
    assert "://" not in answer.text


def test_page_shows_a_scrape_configuration_for_this_address(client: httpx.Client) -> None:
    """What is to be copied names the node as the visitor called it, and nothing that a stranger made up."""
    usual = client.get("/", headers={"Host": "node7:9847"}).text
    strange = client.get("/", headers={"Host": "<script>alert(1)</script>"}).text

    assert "targets: [&#x27;node7:9847&#x27;]" in usual
    assert "<script" not in strange


def test_unknown_path_is_plain_text(client: httpx.Client) -> None:
    """A wrong path says so without a page."""
    answer = client.get("/metric")

    assert (404, "text/plain; charset=utf-8") == (
        answer.status_code,
        answer.headers["content-type"],
    )


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
        for _ in range(MAX_CONCURRENT_SCRAPES_PER_CLIENT + 4)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(statuses) >= 4)
    collector.gate.set()
    for thread in threads:
        thread.join(60)

    assert 1 == collector.runs
    assert {200, 503} == set(statuses)
    assert MAX_CONCURRENT_SCRAPES_PER_CLIENT == statuses.count(200)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("10", 9.5), ("1", 0.5), ("0.5", 0.25), ("", None), (None, None), ("x", None), ("-1", None), ("nan", None),
     ("inf", None), ("1e300", None), ("0", None)],
)  # fmt: skip
def test_answer_seconds_of_a_scraper(header: str | None, seconds: float | None) -> None:
    """Its timeout less a margin; what is no timeout is none."""
    assert seconds == answer_seconds(header)


def test_impatient_scrape_gets_what_is_known_and_spoils_nothing(open_client: Open) -> None:
    """A scraper with a short timeout is answered in time; the patient one beside it gets the whole collection."""
    collector = Gate()
    client = open_client(collector)
    with closing(HTTPConnection(client.base_url.netloc.decode(), timeout=120)) as patient:
        patient.request("GET", "/metrics")
        for _ in range(3):
            client.get(
                "/-/healthy"
            )  # asked later: when it is answered, the patient scrape was taken up
        hurried = client.get(
            "/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"}
        ).text
        collector.gate.set()
        waited = patient.getresponse().read()

    assert "known_so_far" in hurried
    assert b"" == waited
    assert 1 == collector.runs


def test_impatient_scrape_of_a_slow_driver_shows_the_rest(
    open_exporter: Callable[..., Exporter], open_client: Open, run_dir: Path
) -> None:
    """While the driver takes its time, allocator series are there and NVML is said not to have answered yet."""
    gate = threading.Event()

    def answer_late() -> list[FakeGpu]:
        assert gate.wait(120)
        return []

    publish(run_dir, own_sample())
    client = open_client(open_exporter(FakeNvml(answer_late), deadline_seconds=60))
    hurried = client.get("/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"}).text
    gate.set()
    shown, whole = Exposition.of_text(hurried), Exposition.of_text(client.get("/metrics").text)

    assert (0.0, 1.0) == (
        shown.value("nvml_up", reason="timeout"),
        shown.value("torchmem_process_state", state="running"),
    )
    assert 1.0 == whole.value("nvml_up")


def test_taken_port_is_one_sentence(
    client: httpx.Client, open_exporter: Callable[..., Exporter]
) -> None:
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

    assert again.stopped.wait(120)
    assert server.stopped.wait(120)


def test_server_that_is_closed_while_it_starts(open_exporter: Callable[..., Exporter]) -> None:
    """Closing a server right after starting it stops it."""
    exporter = open_exporter()
    for _ in range(10):
        server = serve(exporter)
        server.close()

        assert server.stopped.wait(60)


async def stop_while_a_client_connects(problems: list[Any], *, connects_first: bool) -> None:
    """Cancel accepting in the same turn of the event loop in which a client connects."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        connections = Connections(Limits(), lambda: None, lambda _: asyncio.Protocol())
        accepting = asyncio.create_task(connections.serve(listener))
        await asyncio.sleep(0.01)
        stop, stopped = os.pipe()
        loop.add_reader(stop, lambda: accepting.cancel() and loop.remove_reader(stop))
        client.setblocking(False)
        if connects_first:
            client.connect_ex(listener.getsockname())
        os.write(stopped, b"x")
        client.connect_ex(listener.getsockname())  # does nothing the second time
        await asyncio.wait({accepting})
        await asyncio.sleep(0.01)
        os.close(stop)
        os.close(stopped)


@pytest.mark.parametrize("connects_first", [True, False])
def test_connection_that_arrives_while_the_server_stops(*, connects_first: bool) -> None:
    """It leaves no socket open and causes no traceback."""
    problems: list[Any] = []
    gc.collect()  # so that warnings about other tests' objects are not counted
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(stop_while_a_client_connects(problems, connects_first=connects_first))
        gc.collect()

    assert [] == problems
    assert [] == [str(warning.message) for warning in warned]


def test_uvicorn_has_the_minor_version_that_the_server_was_written_for(root: Path) -> None:
    """The server overrides undocumented methods of uvicorn's Server and H11Protocol.

    For another minor version, compare uvicorn's server.py and protocols/http/h11_impl.py with those
    of this one, run the tests, then change the pins and the version here.
    """
    assert '"uvicorn>=0.54,<0.55"' in (root / "pyproject.toml").read_text()
    assert "\nuvicorn==0.54." in (root / "exporter" / "constraints.txt").read_text()
    assert uvicorn.__version__.startswith("0.54.")
