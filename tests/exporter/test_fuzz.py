"""Random and mutated input at every door: no crash, no wrong answer, and the server goes on. About 2,200 inputs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exposition import Exposition
from support.fuzz import TARGETS
from support.publishing import own_sample, publish
from support.raw_http import ask, connect, everything, status
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.run_directory import RunDirectory
from torchmem.exporter.server import serve
from torchmem.exporter.testing import FakeNvml
from torchmem.exporter.web.connections import Limits
from torchmem.sample.sample import encode

EXAMPLES, REQUESTS = 400, 200
WORDS = {
    "settings_file": [
        "listen",
        "run_dir",
        "ttl_seconds",
        "processes_per_gpu",
        "web_config_file",
        ":9847",
        "1e9",
        "~",
    ],
    "web_config_file": [
        *(
            "tls_server_config",
            "cert_file",
            "key_file",
            "cert",
            "client_auth_type",
            "cipher_suites",
            "min_version",
        ),
        *(
            "http_server_config",
            "headers",
            "X-Frame-Options",
            "basic_auth_users",
            "rate_limit",
            "interval",
            "burst",
        ),
        *("$2y$10$" + "a" * 53, "1m3s", "TLS12", "NoClientCert", "/dev/null", "."),
    ],
    "yaml_file": [
        "<<",
        "&a",
        "*a",
        "!!binary",
        "!!python/object:os.system",
        "2001-99-99",
        "0b_",
        "? ",
        "---",
        "%YAML 9",
    ],
    "headers": [
        "gzip",
        "q=",
        "0.5",
        "application/openmetrics-text",
        "version=",
        "1.0.0",
        "Basic ",
        "Ojo=",
        "nan",
        "1e999",
    ],
}
YAML_MARKS = [
    ": ",
    "\n",
    "\n  ",
    "\n- ",
    "{",
    "}",
    "[",
    "]",
    ",",
    '"',
    "'",
    "|",
    ">",
    "#",
    "1",
    "-1",
    "true",
    "\t",
    "\0",
]


def around(words: list[str]) -> st.SearchStrategy[bytes]:
    """Bytes made of these words, of marks between them and of anything."""
    known = st.sampled_from([*words, *YAML_MARKS]).map(str.encode)
    return st.lists(known | known | known | st.binary(max_size=6), max_size=24).map(b"".join)


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """`valid` with a few pieces cut out, doubled or overwritten."""
    position = st.integers(0, len(valid))
    edits = st.lists(st.tuples(position, position, st.binary(max_size=8)), min_size=1, max_size=4)

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        content = valid
        for start, end, piece in changes:
            content = content[:start] + piece + content[end if end - start < 64 else start :]
        return content

    return edits.map(apply)


@pytest.mark.parametrize("target", WORDS)
def test_any_text_is_understood_or_refused_in_one_sentence(target: str) -> None:
    """400 texts of known words, marks and random bytes for each door."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(around(WORDS[target]))
    def hold(content: bytes) -> None:
        TARGETS[target](content)

    hold()


@settings(max_examples=EXAMPLES, deadline=None)
@given(mutated(encode(own_sample())) | st.binary(max_size=200))
def test_any_sample_file_is_refused_or_served_validly(content: bytes) -> None:
    """400 sample files with pieces cut out, doubled and overwritten."""
    TARGETS["sample_file"](content)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An exporter with one rank that gives up on slow clients early."""
    run_dir: Path = tmp_path_factory.mktemp("run")
    publish(run_dir, own_sample())
    limits = Limits(connections=16, head_seconds=0.05, idle_seconds=0.05, sweep_seconds=0.02)
    exporter = Exporter(FakeNvml.of(), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter, limits=limits)) as server:
        yield server.url


def scrape(url: str) -> str:
    """The exposition; nothing when this client, too, was slower than the tight limits of this server allow."""
    answer = ask(url, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return answer.partition(b"\r\n\r\n")[2].decode() if status(answer) == 200 else ""


REQUEST = (
    b"GET /metrics HTTP/1.1\r\nHost: node5:9847\r\nUser-Agent: Prometheus/3.5.0\r\nAccept-Encoding: gzip;q=0.9\r\n"
    b"Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n"
    b"X-Prometheus-Scrape-Timeout-Seconds: 10\r\nConnection: keep-alive\r\n\r\n"
)
PIECES = [
    *(
        b"GET ",
        b"HEAD ",
        b"POST ",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"/metrics",
        b"/sd",
        b"/-/ready",
        b"/",
        b"?a=b",
    ),
    *(
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b" HTTP/9.9\r\n",
        b"Host: x\r\n",
        b"Content-Length: ",
        b"5",
        b"-5",
        b"\r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"0\r\n\r\n",
        b"Expect: 100-continue\r\n",
        b"Upgrade: h2c\r\n",
        b"\r\n\r\n",
    ),
    *(
        b"Connection: close\r\n",
        b"Authorization: Basic Og==\r\n",
        b"\0",
        b"\xff",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ),
]
requests = (
    mutated(REQUEST)
    | st.lists(st.sampled_from(PIECES) | st.binary(max_size=5), max_size=16).map(b"".join)
    | st.binary(max_size=100)
)


@settings(
    max_examples=REQUESTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=requests, cut=st.integers(0, 300))
def test_any_bytes_on_the_socket_leave_the_server_serving(
    url: str, request: bytes, cut: int
) -> None:
    """200 requests of random bytes, of pieces and of mutations, in two parts: answered properly or cut off."""
    with connect(url) as client:
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(request[:cut])
            client.sendall(request[cut:])
        answer = everything(client)

    assert answer == b"" or status(answer) in {200, 400, 404, 405, 413, 503}
    scraped = until(lambda: scrape(url))
    shown = Exposition.of_text(scraped)
    assert 1.0 == shown.value("torchmem_process_state", state="running")
