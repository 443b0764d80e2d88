"""Random and mutated input: no crash, and the server keeps serving. About 2,200 inputs."""

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
    "settings_file": (
        [
            "listen",
            "run_dir",
            "ttl_seconds",
            "processes_per_gpu",
            "web_config_file",
            ":9847",
            "1e9",
            "~",
        ]
    ),
    "web_config_file": [
        *[
            "tls_server_config",
            "cert_file",
            "key_file",
            "cert",
            "client_auth_type",
            "cipher_suites",
        ],
        *["min_version", "http_server_config", "headers", "X-Frame-Options", "basic_auth_users"],
        *["rate_limit", "interval", "burst", "1m3s", "TLS12", "NoClientCert", "/dev/null", "."],
        "$2y$10$" + "a" * 53,
    ],
    "yaml_file": [
        *["<<", "&a", "*a", "!!binary", "!!python/object:os.system", "2001-99-99", "0b_", "---"],
        "? ",
        "%YAML 9",
    ],
    "headers": [
        *[
            "gzip",
            "q=",
            "0.5",
            "application/openmetrics-text",
            "version=",
            "1.0.0",
            "Ojo=",
            "nan",
            "1e999",
        ],
        "Basic ",
    ],
}
YAML_PUNCTUATION = [": ", "\n", "\n  ", "\n- ", "\t", "\0", *"{}[],|>#1\"'", "-1", "true"]


def around(words: list[str]) -> st.SearchStrategy[bytes]:
    """Generate bytes from these words, YAML punctuation and random bytes."""
    known = st.sampled_from([*words, *YAML_PUNCTUATION]).map(str.encode)
    return st.lists(known | known | known | st.binary(max_size=6), max_size=24).map(b"".join)


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """Generate `valid` with a few pieces removed, duplicated or overwritten."""
    position = st.integers(0, len(valid))
    edits = st.lists(st.tuples(position, position, st.binary(max_size=8)), min_size=1, max_size=4)

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        content = valid
        for start, end, piece in changes:
            content = content[:start] + piece + content[end if end - start < 64 else start :]
        return content

    return edits.map(apply)


@pytest.mark.parametrize("target", WORDS)
def test_any_text_is_accepted_or_rejected_in_one_sentence(target: str) -> None:
    """Each parser handles 400 texts of known words, punctuation and random bytes."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(around(WORDS[target]))
    def hold(content: bytes) -> None:
        TARGETS[target](content)

    hold()


@settings(max_examples=EXAMPLES, deadline=None)
@given(mutated(encode(own_sample())) | st.binary(max_size=200))
def test_any_sample_file_is_rejected_or_exported(content: bytes) -> None:
    """400 sample files with pieces removed, duplicated and overwritten are handled."""
    TARGETS["sample_file"](content)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve an exporter with one rank and short time limits, and yield its URL."""
    run_dir: Path = tmp_path_factory.mktemp("run")
    publish(run_dir, own_sample())
    limits = Limits(connections=16, head_seconds=0.05, idle_seconds=0.05, sweep_seconds=0.02)
    exporter = Exporter(FakeNvml.of(), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter, limits=limits)) as server:
        yield server.url


def scrape(url: str) -> str:
    """Return the exposition, or nothing if this client exceeds the short time limits too."""
    answer = ask(url, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return answer.partition(b"\r\n\r\n")[2].decode() if status(answer) == 200 else ""


REQUEST = (
    b"GET /metrics HTTP/1.1\r\nHost: node5:9847\r\nUser-Agent: Prometheus/3.5.0\r\n"
    b"Accept-Encoding: gzip;q=0.9\r\nAccept: application/openmetrics-text;version=1.0.0,"
    b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n"
    b"X-Prometheus-Scrape-Timeout-Seconds: 10\r\nConnection: keep-alive\r\n\r\n"
)
METHODS = [b"GET ", b"HEAD ", b"POST ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
TARGET_PATHS = [b"/metrics", b"/sd", b"/-/ready", b"/", b"?a=b"]
VERSIONS = [b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/9.9\r\n"]
HEADERS = [
    b"Host: x\r\n",
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: close\r\n",
    b"Authorization: Basic Og==\r\n",
]
OTHER = [b"5", b"-5", b"\r\n", b"0\r\n\r\n", b"\r\n\r\n", b"\0", b"\xff"]
TLS_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00"
PIECES = [*METHODS, *TARGET_PATHS, *VERSIONS, *HEADERS, *OTHER, TLS_HANDSHAKE]
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
def test_server_survives_any_request(url: str, request: bytes, cut: int) -> None:
    """200 random and mutated requests, sent in two parts, are answered or cut off."""
    with connect(url) as client:
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(request[:cut])
            client.sendall(request[cut:])
        answer = everything(client)

    assert answer == b"" or status(answer) in {200, 400, 404, 405, 413, 503}
    scraped = until(lambda: scrape(url))
    metrics = Exposition.of_text(scraped)
    assert 1.0 == metrics.value("torchmem_process_state", state="running")
