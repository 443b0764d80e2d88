"""The exporter over HTTP: metrics, probes and the landing page."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.core import Metric
from support import promtool
from support.collectors import EmptyCollector
from support.exposition import Exposition
from support.needs import needs
from support.publishing import own_sample, publish
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.scrapes import (
    MAX_CONCURRENT_SCRAPES_PER_CLIENT,
    OPENMETRICS,
    TEXT,
    Collector,
    Format,
    Scrapes,
    accepts_gzip,
    answer_seconds,
    choose_format,
)
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.web.connections import ConnectionLimits, Connections
from torchmem.sample.errors import UsageError

OPENMETRICS_ACCEPT = "application/openmetrics-text;version=1.0.0"
Open = Callable[..., httpx.Client]


class Gate(EmptyCollector):
    """A collector that counts its runs, each of which waits until the gate is open."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = threading.Event()

    def collect(self) -> list[Metric]:
        """Wait, then return nothing."""
        self.runs += 1
        assert self.gate.wait(120)
        return []

    def known(self) -> list[Metric]:
        """Return one family, which shows that the scrape did not wait."""
        return [Metric("known_so_far", "", "gauge")]


@pytest.fixture
def open_client() -> Iterator[Open]:
    """Return a function that serves a collector and returns a client."""
    opened: list[tuple[ExporterServer, httpx.Client]] = []

    def open_client(collector: Collector, *, web_ui: bool = True) -> httpx.Client:
        server = serve(collector, web_ui=web_ui)
        opened.append((server, httpx.Client(base_url=server.url, trust_env=False, timeout=120)))
        return opened[-1][1]

    yield open_client
    for server, client in opened:
        client.close()
        server.close()


@pytest.fixture
def client(
    open_exporter: Callable[..., Exporter], open_client: Open, run_dir: Path
) -> httpx.Client:
    """Return a client of an exporter with one rank and one GPU."""
    publish(run_dir, own_sample())
    gpu = FakeGpu(GpuIdentity(0, own_sample().devices[0].uuid or ""), MemoryInfo(80, 60, 19, 1))
    return open_client(open_exporter(FakeNvml.of(gpu)))


def test_both_formats_have_the_same_series(client: httpx.Client) -> None:
    """Text and OpenMetrics have the same series, and each matches its content type."""
    text = client.get("/metrics")
    openmetrics = client.get("/metrics", headers={"Accept": OPENMETRICS_ACCEPT})
    text_metrics, openmetrics_metrics = (
        Exposition.of_text(text.text),
        Exposition.of_openmetrics(openmetrics.text),
    )

    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert openmetrics.headers["content-type"].startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    assert set(text_metrics.series) == set(openmetrics_metrics.series)
    assert (
        text_metrics.series["torchmem_reserved_bytes"]
        == openmetrics_metrics.series["torchmem_reserved_bytes"]
    )
    assert text_metrics.value("torchmem_process_state", state="running") == 1.0


WITHOUT_ISAL = """
import asyncio, gzip, sys
sys.modules["isal"] = None
from prometheus_client.core import GaugeMetricFamily
from torchmem.exporter.scrapes import TEXT, Collection, Encoding, Pages
families, pages = [GaugeMetricFamily("memory", "long " * 400, value=1)], Pages()
collection = Collection(families, pages)
body, is_compressed = asyncio.run(collection.body(Encoding(TEXT, is_compressed=True)))
assert is_compressed and gzip.decompress(body) == pages.write(families, TEXT)
"""


def test_zlib_compresses_where_isal_is_missing() -> None:
    """Without a wheel of isal, pages are compressed all the same."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_ISAL], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip", "gzip"), ("identity", None)])
def test_compressed_on_request(client: httpx.Client, accepted: str, encoding: str | None) -> None:
    """A client that accepts gzip gets it, and any other gets an uncompressed answer."""
    answer = client.get("/metrics", headers={"Accept-Encoding": accepted})

    assert encoding == answer.headers.get("content-encoding")
    assert "torchmem_reserved_bytes" in answer.text


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip;q=0", False),
        ("gzip;q=0.001", True),
        ("*", True),
        ("*;q=0", False),
        ("deflate, GZIP ;q=1.0", True),
        ("identity;q=1, *;q=0", False),
        ("gzip;q=0, *", False),
        ("gzip;q=x", False),
        ("br", False),
        ("", False),
        (",".join(["br"] * 500), False),
    ],
)
def test_weight_of_gzip(accepted: str, compressed: bool) -> None:
    """`q=0` forbids gzip, `*` covers unnamed codings, and invalid items are ignored."""
    assert compressed is accepts_gzip(accepted)


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html, */*;q=0.8", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        (PROMETHEUS_2, OPENMETRICS),
        (OPENMETRICS_ACCEPT + ";q=0", TEXT),
        ("application/json", TEXT),
        ('application/openmetrics-text; version="1.0.0"; charset=utf-8', OPENMETRICS),
        ("application/openmetrics-text;version=2.0.0, text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        (OPENMETRICS_ACCEPT + ";q=0.3,text/plain;version=0.0.4;q=0.9", TEXT),
        ("a;;==,;q=,,", TEXT),
    ],
)
def test_format_that_the_client_prefers(accepted: str, chosen: Format) -> None:
    """A client gets OpenMetrics 1.0.0 if it prefers that format, and text otherwise."""
    assert chosen is choose_format(accepted)


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_openmetrics_ends_with_eof(client: httpx.Client, encoding: str) -> None:
    """The exposition ends with `# EOF`, and Vary names the headers it depends on."""
    answer = client.get(
        "/metrics", headers={"Accept": OPENMETRICS_ACCEPT, "Accept-Encoding": encoding}
    )

    assert answer.text.endswith("\n# EOF\n")
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert len(answer.content) > 1000


@pytest.mark.stack
@needs("promtool")
def test_promtool_accepts_the_metrics(client: httpx.Client) -> None:
    """Names, units and help texts follow Prometheus' conventions."""
    lint = promtool.run("check", "metrics", input=client.get("/metrics").text)

    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")


@pytest.fixture
def plain(open_exporter: Callable[..., Exporter], open_client: Open) -> httpx.Client:
    """Return a client of an exporter without the live page."""
    return open_client(open_exporter(), web_ui=False)


def test_links_without_the_live_page(plain: httpx.Client) -> None:
    """With --no-web-ui, `/` links to every path and loads nothing from other hosts."""
    answer = plain.get("/")

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    paths = ("/metrics", "/sd", "/-/healthy", "/-/ready")
    assert [plain.get(path).status_code for path in paths] == [200] * 4
    assert all(f'href="{path}"' in answer.text for path in paths)
    assert "://" not in answer.text


def test_unknown_path_is_plain_text(client: httpx.Client) -> None:
    """An unknown path is 404 in plain text."""
    answer = client.get("/metric")

    assert (
        answer.status_code,
        answer.headers["content-type"],
    ) == (404, "text/plain; charset=utf-8")


def test_ready_after_the_first_collection(open_client: Open) -> None:
    """Readiness needs a collection but no scrape; liveness needs neither."""
    collector = Gate()
    client = open_client(collector)
    before = client.get("/-/ready").status_code
    alive = client.get("/-/healthy").status_code
    collector.gate.set()

    assert (before, alive) == (503, 200)
    assert until(lambda: client.get("/-/ready").status_code == 200 and 200) == 200


def test_simultaneous_scrapes_share_one_collection(open_client: Open) -> None:
    """Concurrent scrapes cost one collection; scrapes beyond the limit get 503 at once."""
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

    assert collector.runs == 1
    assert set(statuses) == {200, 503}
    assert statuses.count(200) == MAX_CONCURRENT_SCRAPES_PER_CLIENT


class Slow(EmptyCollector):
    """A collector that takes a while, and notes when it begins and ends."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def collect(self) -> list[Metric]:
        """Return nothing."""
        begun = time.monotonic()
        time.sleep(0.1)
        self.times.append((begun, time.monotonic()))
        return []


def test_memory_is_given_back_after_the_first_collection() -> None:
    """The server asks for it once the first collection has ended, and not in each scrape."""
    reports = list[int]()
    collector = Slow()
    server = serve(collector, give_back=lambda: reports.append(len(collector.times)))
    with closing(server):
        until(lambda: reports)
        for _ in range(2):
            httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).raise_for_status()

    assert reports == [1]


def test_a_party_rests_between_its_collections() -> None:
    """One that scrapes without a pause leaves two thirds of the time to others; each is new."""
    collector = Slow()

    async def scrape() -> None:
        scrapes = Scrapes(collector)
        for _ in range(3):
            await scrapes.collection_for("greedy", None)

    asyncio.run(scrape())
    ends, begins = [end for _, end in collector.times], [begin for begin, _ in collector.times]

    assert len(begins) == 3
    assert all(begin - end >= 0.19 for begin, end in zip(begins[1:], ends[:-1], strict=True))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("10", 9.5),
        ("1", 0.5),
        ("0.5", 0.25),
        ("", None),
        (None, None),
        ("x", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("1e300", None),
        ("0", None),
    ],
)
def test_time_to_answer_a_scraper(header: str | None, seconds: float | None) -> None:
    """The time is the scraper's timeout less a margin; an invalid timeout is ignored."""
    assert seconds == answer_seconds(header)


def test_scrape_with_a_short_timeout_gets_known_metrics(open_client: Open) -> None:
    """It is answered in time, while a concurrent scrape gets the whole collection."""
    collector = Gate()
    client = open_client(collector)
    with closing(HTTPConnection(client.base_url.netloc.decode(), timeout=120)) as patient:
        patient.request("GET", "/metrics")
        for _ in range(3):
            client.get("/-/healthy")  # once it is answered, the first scrape has started
        hurried = client.get(
            "/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"}
        ).text
        collector.gate.set()
        waited = patient.getresponse().read()

    assert "known_so_far" in hurried
    assert waited == b""
    assert collector.runs == 1


def test_scrape_with_a_short_timeout_and_a_slow_driver(
    open_exporter: Callable[..., Exporter], open_client: Open, run_dir: Path
) -> None:
    """Until the driver responds, allocator metrics are exported and nvml_up is 0."""
    gate = threading.Event()

    def answer_late() -> list[FakeGpu]:
        assert gate.wait(120)
        return []

    publish(run_dir, own_sample())
    client = open_client(open_exporter(FakeNvml(answer_late), deadline_seconds=60))
    hurried = client.get("/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"}).text
    gate.set()
    early, whole = Exposition.of_text(hurried), Exposition.of_text(client.get("/metrics").text)

    assert (
        early.value("nvml_up", reason="timeout"),
        early.value("torchmem_process_state", state="running"),
    ) == (0.0, 1.0)
    assert whole.value("nvml_up") == 1.0


def test_taken_port_is_one_sentence(
    client: httpx.Client, open_exporter: Callable[..., Exporter]
) -> None:
    """The error names the address and the flag to change it."""
    port = client.base_url.port or 0

    with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port} .*--listen"):
        serve(open_exporter(), port=port)


def test_close_does_not_wait_for_a_stuck_scrape(open_client: Open) -> None:
    """A server whose collection hangs is closed, and its port is free again."""
    collector = Gate()
    server = serve(collector)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
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
        connections = Connections(ConnectionLimits(), lambda: None, lambda _: asyncio.Protocol())
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

    assert problems == []
    assert [str(warning.message) for warning in warned] == []
