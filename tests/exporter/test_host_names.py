"""DNS rebinding: a site whose name leads to this machine reads nothing through a user's browser."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from support.collectors import EmptyCollector
from support.local_http import Answer, Request, answering
from support.needs import needs
from support.waiting import until

from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.web.host_names import is_rebound

PATHS = ("/", "/metrics", "/api/v1/state", "/api/v1/rank", "/api/v1/map", "/sd")
BROWSER = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)", "Accept-Language": "en-US,en;q=0.9"}
PROMETHEUS = {"User-Agent": "Prometheus/3.5.0", "X-Prometheus-Scrape-Timeout-Seconds": "10"}
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]", "10.1.2.3", "demo.localhost", platform.node())


@pytest.fixture(scope="module")
def server() -> Iterator[ExporterServer]:
    with closing(serve(EmptyCollector(), allowed_hosts=["GPU.example.org"])) as running:
        yield running


def get(server: ExporterServer, path: str, host: str, headers: dict[str, str]) -> httpx.Response:
    """Ask with a Host header."""
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        client.stream("GET", path, headers={**headers, "Host": host}) as answer,
    ):
        if answer.status_code == 403:
            answer.read()
        return answer


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_with_the_name_of_a_site_is_refused(server: ExporterServer, path: str) -> None:
    """On every path, with one sentence that says what to set."""
    answer = get(server, path, "rebound.example:9847", BROWSER)

    assert answer.status_code == 403
    assert "allowed_hosts" in answer.text
    assert answer.text.count("\n") == 1


@pytest.mark.parametrize("name", ["accept-language", "origin", "referer", "sec-fetch-mode"])
def test_one_header_of_a_browser_is_enough(server: ExporterServer, name: str) -> None:
    """A page may change its user agent, but not all headers by which a browser is known."""
    headers = {**PROMETHEUS, name: ""}

    assert get(server, "/metrics", "rebound.example", headers).status_code == 403


@pytest.mark.parametrize("host", [*OWN_NAMES, "gpu.example.org"])
def test_a_browser_with_a_known_name_is_answered(server: ExporterServer, host: str) -> None:
    """Addresses, localhost, the node's name, and the names of the setting, with any port."""
    assert get(server, "/metrics", host, BROWSER).status_code == 200
    assert get(server, "/metrics", f"{host}:9847", BROWSER).status_code == 200


@pytest.mark.parametrize(
    "host", [*OWN_NAMES, "gpu1.example.org:9847", "torchmem-exporter.monitoring.svc:9847", ""]
)
def test_scrapers_use_any_name(server: ExporterServer, host: str) -> None:
    """Prometheus scrapes by address, host name or service name, also through a local proxy."""
    assert get(server, "/metrics", host, PROMETHEUS).status_code == 200


def test_a_server_on_a_network_is_open_to_all_names() -> None:
    """Browsers elsewhere open the page by a name that only their DNS knows."""
    headers = [(name.lower().encode(), value.encode()) for name, value in BROWSER.items()]
    headers.append((b"host", b"gpu1.example.org:9847"))

    assert is_rebound({"server": ("127.0.0.1", 9847), "headers": headers}, ())
    assert is_rebound({"server": ("::1", 9847), "headers": headers}, ())
    assert is_rebound({"server": ("::ffff:127.0.0.1", 9847), "headers": headers}, ())
    assert not is_rebound({"server": ("10.1.2.3", 9847), "headers": headers}, ())
    assert not is_rebound({"server": ("/run/socket", None), "headers": headers}, ())


PAGE = b"""<!doctype html><script>
fetch("/read", {
  headers: {"Accept-Language": "", "User-Agent": "Prometheus/3.5.0"},
  referrerPolicy: "no-referrer", credentials: "omit", mode: "same-origin",
}).then(() => fetch("/end"))
</script>"""


@needs("chromium")
def test_a_page_cannot_hide_the_browser(tmp_path: Path) -> None:
    """A script in Chromium that leaves out and changes every header it can is still recognized."""
    asked = list[Request]()

    def answer(request: Request) -> Answer:
        asked.append(request)
        return Answer(body=PAGE if request.path == "/" else b"", content_type="text/html")

    with answering(answer) as address:
        port = address.rpartition(":")[2]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        command = ["chromium", *flags, "--host-resolver-rules=MAP rebound.example 127.0.0.1"]
        with subprocess.Popen(
            [*command, f"http://rebound.example:{port}/"], stderr=subprocess.DEVNULL
        ) as chromium:
            until(lambda: any(request.path == "/end" for request in asked))
            chromium.terminate()
    (read,) = (request for request in asked if request.path == "/read")
    raw = [(name.lower().encode(), value.encode()) for name, value in read.headers.items()]

    assert read.headers["Host"] == f"rebound.example:{port}"
    assert is_rebound({"server": ("127.0.0.1", int(port)), "headers": raw}, ())
