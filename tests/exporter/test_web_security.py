"""TLS and passwords of a running exporter, with an HTTP client and with Prometheus."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bcrypt
import httpx
import pytest
from support.certificates import Authority, Pair
from support.needs import needs
from support.publishing import own_sample, publish
from support.raw_http import ask, connect, everything, status
from support.stack import Prometheus, answers, free_port, running
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.server import ExporterServer, serve
from torchmem.exporter.web.access import (
    MAX_WAITING_PASSWORDS_PER_CLIENT,
    REPORT_PATH,
    BasicAuth,
)
from torchmem.exporter.web.config import LiveConfig
from torchmem.exporter.web.connections import ConnectionLimits
from torchmem.exporter.web.fair_queue import BusyError

PASSWORD = "correct horse"  # noqa: S105 - of this test
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
USERS = f"basic_auth_users:\n  prometheus: {HASH}\n"
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
CLIENT_CERTIFICATE = (
    "  client_auth_type: RequireAndVerifyClientCert\n"
    "  client_ca_file: ca.pem\n"
    "  client_allowed_sans: [prometheus]\n"
)
Open = Callable[..., ExporterServer]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority that has issued the server's certificate."""
    authority = Authority(tmp_path / "web")
    authority.issue("server")
    return authority


@pytest.fixture
def open_server(
    open_exporter: Callable[..., Exporter], run_dir: Path, authority: Authority, tmp_path: Path
) -> Iterator[Open]:
    """Return a function that serves an exporter with one rank and a file `web/web.yml`."""
    publish(run_dir, own_sample())
    with ExitStack() as stack:

        def open_server(content: str, limits: ConnectionLimits | None = None) -> ExporterServer:
            file = tmp_path / "web" / "web.yml"
            file.write_text(content)
            server = serve(
                open_exporter(), web=LiveConfig(file), limits=limits or ConnectionLimits()
            )
            stack.callback(server.close)
            return server

        yield open_server


def trusting(authority: Authority, own: Pair | None = None) -> ssl.SSLContext:
    """Return a client's context that trusts `authority` and has the certificate `own`."""
    context = ssl.create_default_context(cafile=str(authority.file))
    if own:
        context.load_cert_chain(own.certificate, own.key)
    return context


def get(
    server: ExporterServer,
    context: ssl.SSLContext | None = None,
    path: str = "/-/healthy",
    **options: Any,
) -> int:
    """Return the status of one request on a new connection, 0 without an answer."""
    try:
        with httpx.Client(
            base_url=server.url, verify=context or False, trust_env=False, timeout=60
        ) as client:
            return client.get(path, **options).status_code
    except (httpx.TransportError, ssl.SSLError):
        return 0


def test_client_certificate_is_required(
    open_server: Open, authority: Authority, tmp_path: Path
) -> None:
    """Only a certificate of the authority with an allowed name is accepted, and only TLS."""
    server = open_server(TLS + CLIENT_CERTIFICATE)
    stranger = Authority(tmp_path / "stranger", "other").issue("prometheus", "prometheus")

    assert get(server, trusting(authority, authority.issue("good", "prometheus"))) == 200
    assert get(server, trusting(authority)) == 0
    assert get(server, trusting(authority, authority.issue("colleague", "grafana"))) == 0
    assert get(server, trusting(authority, stranger)) == 0
    with connect(server.url) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"torchmem_" not in everything(plain)


def test_tls_versions_are_limited(open_server: Open, authority: Authority) -> None:
    """With TLS 1.3 as the minimum, a client that supports only TLS 1.2 is refused."""
    server = open_server(TLS + "  min_version: TLS13\n")
    old = trusting(authority)
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    assert (get(server, trusting(authority)), get(server, old)) == (200, 0)


def test_renewed_certificates_are_used_without_a_restart(
    open_server: Open, authority: Authority, tmp_path: Path
) -> None:
    """New connections use the new files; a half-finished renewal has no effect."""
    server = open_server(
        TLS + "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.pem\n"
    )
    old = trusting(authority, authority.issue("old", "prometheus"))
    new = Authority(tmp_path / "renewed")
    pair, client = new.issue("server"), new.issue("client", "prometheus")
    before = (get(server, old), get(server, trusting(new)))
    shutil.copy(pair.certificate, tmp_path / "web" / "server.pem")
    halfway = get(server)
    shutil.copy(pair.key, tmp_path / "web" / "server.key")
    shutil.copy(new.file, tmp_path / "web" / "ca.pem")

    assert (before, halfway) == ((200, 0), 200)
    assert get(server, trusting(new, client)) == 200
    assert get(server, old) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 401),
        ({"auth": ("prometheus", "wrong")}, 401),
        ({"auth": ("unknown", PASSWORD)}, 401),
        ({"auth": ("prometheus", PASSWORD)}, 200),
        ({"auth": ("prometheus", "x" * 5000)}, 401),
        ({"auth": ("prometheus", "a\0b")}, 401),
        ({"headers": {"Authorization": "Bearer abc"}}, 401),
        ({"headers": {"Authorization": "Basic ???"}}, 401),
        ({"headers": {"Authorization": "Basic " + "=" * 9}}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/sd", "/", "/-/healthy", "/nothing"])
def test_password_is_required_on_every_path(
    open_server: Open, path: str, options: dict[str, Any], expected: int
) -> None:
    """Without the right password, every path answers 401, even one that does not exist."""
    answered = get(open_server(USERS), path=path, **options)

    assert (404 if (path, expected) == ("/nothing", 200) else expected) == answered


def test_no_body_is_invited_without_the_password(open_server: Open) -> None:
    """A client that waits for 100 Continue gets 401, and the connection ends: its body may come."""
    request = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    answer = ask(open_server(USERS).url, request.encode() + b"Expect: 100-continue\r\n\r\n")

    assert status(answer) == 401


def test_users_change_without_a_restart(open_server: Open, tmp_path: Path) -> None:
    """A removed user is rejected at the next request, even with a remembered password."""
    server = open_server(USERS)
    before = get(server, auth=("prometheus", PASSWORD))
    (tmp_path / "web" / "web.yml").write_text(f"basic_auth_users: {{other: {HASH}}}")

    assert (
        before,
        get(server, auth=("prometheus", PASSWORD)),
        get(server, auth=("other", PASSWORD)),
    ) == (200, 401, 200)


def header(name: str, password: str) -> str:
    """Return an Authorization header."""
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def test_bcrypt_is_skipped_only_for_verified_passwords() -> None:
    """A verified password is remembered; an unknown name costs as much as a known one."""
    checks = Checks()

    async def ask() -> list[bool]:
        auth, users = BasicAuth(checks), {"prometheus": HASH}
        asked = [("prometheus", PASSWORD)] * 5 + [
            ("unknown", PASSWORD),
            ("prometheus", "wrong"),
        ] * 2
        return [await auth.admits(header(*who), "client", users) for who in asked]

    assert asyncio.run(ask()) == [True] * 5 + [False] * 4
    assert checks.costs == [4] * 5


class Checks:
    """A check of passwords that notes each password and the cost of its hash."""

    def __init__(self) -> None:
        self.passwords: list[bytes] = []
        self.costs: list[int] = []

    def __call__(self, password: bytes, hashed: str) -> bool:
        """Return whether the password matches."""
        self.passwords.append(password)
        self.costs.append(int(hashed[4:6]))
        return bcrypt.checkpw(password, hashed.encode())


@pytest.mark.parametrize("name", ["cheap", "costly", "unknown"])
def test_wrong_password_takes_as_long_for_every_name(name: str) -> None:
    """A wrong password costs the work of the highest cost, so its time does not show who exists."""
    checks = Checks()
    users = {
        "cheap": HASH,
        "costly": bcrypt.hashpw(b"other", bcrypt.gensalt(7)).decode(),
    }

    assert not asyncio.run(BasicAuth(checks).admits(header(name, "wrong"), "client", users))
    assert sum(2**cost for cost in checks.costs) == 2**7


def test_concurrent_password_checks_of_one_client_are_limited() -> None:
    """Of many concurrent passwords of one client, some wait and the rest get BusyError."""

    async def guess() -> list[bool | BaseException]:
        auth, users = BasicAuth(), {"prometheus": HASH}
        asked = (
            auth.admits(header("prometheus", str(number)), "client", users)
            for number in range(MAX_WAITING_PASSWORDS_PER_CLIENT + 30)
        )
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(guess())
    busy = sum(isinstance(answer, BusyError) for answer in answers)

    # The first one is checked at once and does not wait.
    assert (answers.count(False), busy) == (MAX_WAITING_PASSWORDS_PER_CLIENT + 1, 29)


def test_wrong_passwords_of_some_clients_do_not_delay_another_one() -> None:
    """While three clients have forty passwords each in the queue, another client is served next."""
    checks = Checks()

    async def flood() -> bool:
        auth, users = BasicAuth(checks), {"prometheus": HASH}
        guesses = [
            asyncio.ensure_future(
                auth.admits(header("prometheus", f"{client} {number}"), client, users)
            )
            for number in range(40)
            for client in ("10.0.0.1", "10.0.0.2", "10.0.0.3")
        ]
        await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
        admitted = await auth.admits(header("prometheus", PASSWORD), "10.0.0.9", users)
        await asyncio.wait(guesses)
        return admitted

    assert asyncio.run(flood())
    assert checks.passwords.index(PASSWORD.encode()) <= 6
    assert [b"10.0.0.%d" % n for n in (1, 2, 3)] * 12 == [
        password.split()[0] for password in checks.passwords[-36:]
    ]


def test_passwords_of_clients_that_have_gone_are_not_checked() -> None:
    """A request that is cancelled leaves the queue."""
    checks = Checks()

    async def go_away() -> None:
        auth, users = BasicAuth(checks), {"prometheus": HASH}
        guesses = [
            asyncio.ensure_future(auth.admits(header("prometheus", str(number)), "client", users))
            for number in range(40)
        ]
        await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
        for guess in guesses:
            guess.cancel()
        await asyncio.wait(guesses)
        await auth.admits(header("prometheus", "last"), "client", users)

    asyncio.run(go_away())

    assert checks.passwords[-1] == b"last"
    assert len(checks.passwords) < 40


def test_correct_password_after_a_restart_with_a_flood_of_wrong_ones(open_server: Open) -> None:
    """The first correct password is admitted while 36 connections guess without a pause."""
    server = open_server(USERS)
    guess = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nAuthorization: %s\r\n\r\n"
    with ExitStack() as stack:
        for number in range(36):
            client = stack.enter_context(connect(server.url))
            client.sendall(guess % header("prometheus", str(number)).encode() * 100)

        assert get(server, auth=("prometheus", PASSWORD)) == 200


def test_headers_and_rate_limit(open_server: Open) -> None:
    """Every answer has the configured headers; requests beyond the burst get 429."""
    headers = "http_server_config: {headers: {X-Frame-Options: deny}}\n"
    server = open_server(headers + "rate_limit: {interval: 1h, burst: 2}\n")
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        answered = [client.get("/-/healthy") for _ in range(3)]

    assert [answer.status_code for answer in answered] == [200, 200, 429]
    assert [answer.headers["x-frame-options"] for answer in answered] == ["deny"] * 3


def test_a_rate_limit_is_that_of_each_client(open_server: Open) -> None:
    """A client that has used up its requests takes none from another."""
    server = open_server("rate_limit: {interval: 1h, burst: 2}\n")

    def answers(address: str) -> list[int]:
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(base_url=server.url, transport=transport, timeout=60) as client:
            return [client.get("/-/healthy").status_code for _ in range(3)]

    assert answers("127.0.0.1") == [200, 200, 429]
    assert answers("127.0.0.2") == [200, 200, 429]
    assert answers("127.0.0.1") == [429, 429, 429]


def test_silent_connections_do_not_block_others(open_server: Open, authority: Authority) -> None:
    """Connections without a TLS handshake make room for others and are closed."""
    limits = ConnectionLimits(connections=4, head_seconds=2.0, sweep_seconds=0.05)
    server = open_server(TLS, limits)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server.url)) for _ in range(20)]

        assert get(server, trusting(authority)) == 200
        assert [everything(client) for client in silent] == [b""] * 20


def test_invalid_file_at_start_is_one_sentence_and_code_2(run_dir: Path, tmp_path: Path) -> None:
    """The exporter does not start when its web configuration is invalid."""
    (tmp_path / "web.yml").write_text("basic_auth_user: {}")
    flags = ["--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
    flags += ["--web.config.file", str(tmp_path / "web.yml")]
    command = [sys.executable, "-m", "torchmem.cli", "exporter", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert re.search(
        r"unknown key 'basic_auth_user' in .*web\.yml, line 1: did you mean 'basic_auth_users'",
        ended.stderr,
    )


PROMETHEUS = """
scrape_configs:
  - job_name: torchmem
    scheme: https
    scrape_interval: 1s
    basic_auth: {{username: prometheus, password: {password}}}
    tls_config:
      ca_file: {folder}/ca.pem
      cert_file: {folder}/prometheus.pem
      key_file: {folder}/prometheus.key
    static_configs:
      - targets: ['{address}']
"""


@pytest.mark.stack
@needs("prometheus")
def test_prometheus_scrapes_with_certificate_and_password(
    open_server: Open, authority: Authority, tmp_path: Path
) -> None:
    """Prometheus scrapes with TLS, a client certificate and a password together."""
    server = open_server(TLS + CLIENT_CERTIFICATE + USERS)
    authority.issue("prometheus", "prometheus")
    file = tmp_path / "prometheus.yml"
    file.write_text(
        PROMETHEUS.format(
            password=PASSWORD, folder=tmp_path / "web", address=server.url.removeprefix("https://")
        )
    )
    url = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={url}",
        "--log.level=warn",
    ]
    with running(command, tmp_path / "prometheus.log"):
        until(lambda: answers(f"http://{url}/-/ready"))
        prometheus = Prometheus(f"http://{url}")

        assert until(lambda: prometheus.value('up{job="torchmem"} == 1'))
        assert until(lambda: prometheus.value('torchmem_process_state{state="running"}'))
