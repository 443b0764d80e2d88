"""The web configuration file: exporter-toolkit's format, its errors, and reloading."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import bcrypt
import pytest
from support.certificates import Authority

from torchmem.exporter.web.access import Rates
from torchmem.exporter.web.config import LiveConfig, RateLimit, load
from torchmem.sample.errors import UsageError

HASH = bcrypt.hashpw(b"secret", b"$2b$04$abcdefghijklmnopqrstuu").decode()
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a server certificate and its authority."""
    folder = tmp_path_factory.mktemp("web")
    Authority(folder).issue("server")
    return folder


@pytest.fixture
def write(folder: Path) -> Write:
    """Return a function that writes the configuration file into that directory."""

    def write(content: str) -> Path:
        file = folder / "web.yml"
        file.write_text(content)
        return file

    return write


def test_everything_at_once(write: Write) -> None:
    """Every key that Python's TLS supports has its effect; paths start at the file."""
    config = load(
        write(f"""
tls_server_config:
  cert_file: server.pem
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  client_allowed_sans: [prometheus, 10.0.0.1]
  min_version: TLS12
  max_version: TLS12
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_AES_128_GCM_SHA256]
  curve_preferences: [CurveP384]
  prefer_server_cipher_suites: false
http_server_config:
  http2: true
  headers:
    X-Frame-Options: deny
    Strict-Transport-Security: max-age=60
rate_limit: {{interval: 1m30s, burst: 3}}
basic_auth_users:
  prometheus: {HASH}
""")
    )

    assert config.tls is not None
    context = config.tls.context
    below_13 = [
        cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] == "TLSv1.2"
    ]
    assert (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2) == (
        context.minimum_version,
        context.maximum_version,
    )
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert below_13 == ["ECDHE-RSA-AES256-GCM-SHA384"]
    assert not context.options & ssl.OP_CIPHER_SERVER_PREFERENCE
    assert config.tls.allowed_sans == {"prometheus", "10.0.0.1"}
    assert config.users == (("prometheus", HASH),)
    assert config.headers == (
        ("X-Frame-Options", "deny"),
        ("Strict-Transport-Security", "max-age=60"),
    )
    assert RateLimit(90.0, 3) == config.rate_limit


@pytest.mark.parametrize(
    "content", ["", "{}", "tls_server_config:", "basic_auth_users: {}", "rate_limit: {interval: 0}"]
)
def test_empty_file_is_plain_http(write: Write, content: str) -> None:
    """An empty file, or one with empty sections, is valid and has no effect."""
    config = load(write(content))

    assert (config.tls, config.users, config.headers, config.rate_limit) == (None, (), (), None)


def test_certificate_and_key_in_the_file_itself(write: Write, folder: Path) -> None:
    """`cert` and `key` hold PEM text instead of a path."""
    parts = {
        "cert": folder / "server.pem",
        "key": folder / "server.key",
        "client_ca": folder / "ca.pem",
    }
    lines = [f"  {key}: |\n{indent(file.read_text(), '    ')}" for key, file in parts.items()]
    text = "\n".join(lines)
    config = load(write(f"tls_server_config:\n  client_auth_type: VerifyClientCertIfGiven\n{text}"))

    assert config.tls is not None
    assert (config.tls.context.verify_mode, config.tls.files) == (ssl.CERT_OPTIONAL, ())


def test_ciphers_of_tls_12_have_forward_secrecy_and_authenticate_data(write: Write) -> None:
    """By default there is no suite with static RSA or CBC, whatever the system's OpenSSL offers."""
    tls = load(write(TLS)).tls

    assert tls is not None
    ciphers = [cipher for cipher in tls.context.get_ciphers() if cipher["protocol"] == "TLSv1.2"]
    assert {(cipher["kea"], cipher["aead"]) for cipher in ciphers} == {("kx-ecdhe", True)}


def test_only_tls_13_suites_require_tls_13(write: Write) -> None:
    """Without a suite for TLS 1.2, clients need TLS 1.3, as in Go."""
    tls = load(write(TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256]")).tls

    assert tls is not None
    assert ssl.TLSVersion.TLSv1_3 is tls.context.minimum_version


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "tls_server_confg: {}",
            "unknown key 'tls_server_confg' in {file}, line 1: did you mean 'tls_server_config'?",
        ),
        (
            TLS + "  client_ca: x\n  min_versoin: TLS12",
            "'tls_server_config.min_versoin' in {file}, line 5: did you",
        ),
        (TLS + "  cert_file: other.pem", "duplicate key 'cert_file' in {file}, line 4"),
        (
            "tls_server_config: {cert_file: server.pem}",
            "tls_server_config.key_file in {file} is missing",
        ),
        (
            "tls_server_config: {key_file: server.key}",
            "tls_server_config.cert_file in {file} is missing",
        ),
        ("tls_server_config: {client_auth_type: NoClientCert}", "cert_file in {file} is missing"),
        (
            "tls_server_config: {cert_file: none.pem, key_file: server.key}",
            "cannot be read ({folder}/none.pem: No such",
        ),
        (
            "tls_server_config: {cert_file: /dev/zero, key_file: server.key}",
            "cannot be read (/dev/zero: not a PEM file)",
        ),
        (
            'tls_server_config: {cert_file: "a\\eb.pem", key_file: server.key}',
            "cannot be read ({folder}/a\N{REPLACEMENT CHARACTER}b.pem: No such",
        ),
        (
            'basic_auth_users: {"a\\eb": 1}',
            "basic_auth_users.a\N{REPLACEMENT CHARACTER}b in {file}",
        ),
        (
            "tls_server_config: {cert_file: server.pem, key_file: web.yml}",
            "and its key cannot be used",
        ),
        (
            TLS + "  cert: x",
            "tls_server_config.cert in {file}, line 4, is given together with cert_file",
        ),
        (
            TLS + "  client_auth_type: RequireAnyClientCert",
            "Python's TLS verifies every certificate",
        ),
        (
            TLS + "  client_auth_type: RequestClientCert",
            "Python's TLS verifies every certificate",
        ),
        (TLS + "  client_auth_type: Require", "is 'Require': give one of NoClientCert"),
        (
            TLS + "  client_auth_type: RequireAndVerifyClientCert",
            "needs a certificate authority: add client_ca_file",
        ),
        (TLS + "  client_ca_file: ca.pem", "has no effect without client_auth_type"),
        (
            TLS + "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: web.yml",
            "has no certificate",
        ),
        (
            TLS + "  client_allowed_sans: [a]",
            "needs client_auth_type: add RequireAndVerifyClientCert",
        ),
        (TLS + "  client_allowed_sans: a", "is 'a': give a list of text"),
        (TLS + "  client_allowed_sans: [[a]]", "line 4, is not a list of text"),
        (TLS + "  min_version: TLS10", "is TLS10, which OpenSSL no longer supports"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12", "is TLS12, below min_version"),
        (TLS + "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", "has 'TLS_RSA_WITH_RC4_128_SHA'"),
        (
            TLS + "  max_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256]",
            "has no suite for TLS 1.2",
        ),
        (TLS + "  curve_preferences: [X25519, CurveP256]", "Python's TLS supports only one"),
        (TLS + "  curve_preferences: [P256]", "did you mean 'CurveP256'?"),
        (TLS + "  prefer_server_cipher_suites: 1", "is 1: give true or false"),
        (
            "http_server_config: {http2: often}",
            "http_server_config.http2 in {file}, line 1, is 'often': give true",
        ),
        (
            "http_server_config: {headers: {Server: x}}",
            "unknown key 'http_server_config.headers.Server'",
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: allow}}",
            "is 'allow': give one of deny, sameorigin",
        ),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}', "is not a valid header"),
        (
            "basic_auth_users: {alice: secret}",
            "basic_auth_users.alice in {file}, line 1, is not a bcrypt hash",
        ),
        ("basic_auth_users: {alice: " + HASH.replace("$04$", "$31$") + "}", "has cost 31"),
        (
            "basic_auth_users: [alice]",
            "basic_auth_users in {file}, line 1, is a list: give `key: value` lines",
        ),
        (
            "rate_limit: {interval: soon, burst: 1}",
            "rate_limit.interval in {file}, line 1, is 'soon': give a duration",
        ),
        ("rate_limit: {interval: 1s}", "admits no request without a burst"),
        (
            "rate_limit: {interval: 1s, burst: -1}",
            "rate_limit.burst in {file}, line 1, is -1: give a whole number",
        ),
        ("- tls_server_config", "must hold `key: value` lines"),
        ("a: [", "is not valid YAML at line 1"),
        ("a: &x [*x]", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
    ],
)
def test_error_is_one_sentence(write: Write, folder: Path, content: str, expected: str) -> None:
    """The error names the key, the file, the line and what to do, without secrets."""
    file = write(content)

    with pytest.raises(UsageError) as raised:
        load(file)

    assert expected.format(file=file, folder=folder) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_key_with_a_password_is_rejected(folder: Path, write: Write) -> None:
    """An encrypted key is an error; OpenSSL does not ask for the password."""
    locked = folder / "locked.key"
    locked.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )

    with pytest.raises(UsageError, match="without a password"):
        load(write("tls_server_config: {cert_file: server.pem, key_file: locked.key}"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    """The error contains the path."""
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none.yml"))):
        load(tmp_path / "none.yml")


def test_live_config_follows_the_file_and_survives_an_invalid_one(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """A new version applies at once; an invalid one is logged once and the last one stays."""
    now = [0.0]
    live = LiveConfig(write(f"basic_auth_users: {{a: {HASH}}}"), clock=lambda: now[0])
    write(f"basic_auth_users: {{a: {HASH}, b: {HASH}}}")
    followed = live.current().users
    write("basic_auth_users: [")
    invalid = [live.current().users for _ in range(3)]
    now[0] += 60
    invalid.append(live.current().users)
    write(f"basic_auth_users: {{c: {HASH}}}")

    assert [name for name, _ in followed] == ["a", "b"]
    assert [followed] * 4 == invalid
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
    assert [name for name, _ in live.current().users] == ["c"]


def test_live_config_retries_without_a_change_of_its_files(tmp_path: Path) -> None:
    """A key that is written after the configuration that names it is loaded."""
    now = [0.0]
    first, second = (Authority(tmp_path / name).issue("server") for name in ("first", "second"))
    file = tmp_path / "web.yml"
    template = "tls_server_config: {{cert_file: {}, key_file: {}}}"
    file.write_text(template.format(first.certificate, first.key))
    live = LiveConfig(file, clock=lambda: now[0])
    key = second.key.read_bytes()
    second.key.unlink()
    file.write_text(template.format(second.certificate, second.key))
    before = live.current()
    second.key.write_bytes(key)
    now[0] += 60
    after = live.current()

    assert before.tls is not None
    assert after.tls is not None
    assert (first.key, second.key) == (before.tls.files[1], after.tls.files[1])


def test_tls_cannot_be_switched_while_running(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """Removing the TLS section does not switch a running server to plain HTTP."""
    live = LiveConfig(write(TLS))
    write("http_server_config: {http2: false}")

    assert live.current().tls is not None
    assert "restart the exporter" in caplog.text


def test_rates() -> None:
    """A client has a burst, then one request per interval; a new limit starts with the burst."""
    now = [0.0]
    rates, limit = Rates(lambda: now[0]), RateLimit(10.0, 3)
    at_once = [rates.admit("a", limit) for _ in range(4)]
    now[0] = 10.0
    later = [rates.admit("a", limit) for _ in range(2)]

    assert (at_once, later) == ([True, True, True, False], [True, False])
    assert rates.admit("b", limit)
    assert rates.admit("a", RateLimit(10.0, 1))
    assert rates.admit("a", None)


def test_rates_of_many_clients_are_bounded() -> None:
    """Those who have not come for longest are forgotten, and one who keeps coming is not."""
    rates, limit = Rates(lambda: 0.0), RateLimit(10.0, 1)
    for number in range(5000):
        rates.admit(str(number), limit)
        rates.admit("often", limit)

    assert rates.admit("0", limit)
    assert not rates.admit("often", limit)


def test_long_names_of_users_are_kept(write: Write) -> None:
    """A name is not cut off, so that two long ones with the same beginning stay two."""
    users = {"x" * 100: HASH, "x" * 101: HASH}
    lines = "".join(f"  {name}: {hashed}\n" for name, hashed in users.items())

    assert users == dict(load(write(f"basic_auth_users:\n{lines}")).users)


def test_directory_in_place_of_a_key(folder: Path, write: Write) -> None:
    """The error contains the path and the reason."""
    (folder / "dir.key").mkdir()

    with pytest.raises(UsageError, match=r"dir\.key: Is a directory"):
        load(write("tls_server_config: {cert_file: server.pem, key_file: dir.key}"))


class Edited(type(Path())):  # type: ignore[misc]  # what Path() gives depends on the system
    """A file that changes right after each of the first reads."""

    edits: list[str]

    def read_bytes(self) -> bytes:
        """Return the content, after writing the next one."""
        content = bytes(super().read_bytes())
        if self.edits:
            self.write_text(self.edits.pop(0))
        return content


def allowed(burst: int) -> str:
    """Return a configuration that is identified by its number."""
    return f"rate_limit: {{interval: 1s, burst: {10**burst}}}\n"


@pytest.mark.parametrize("changes", [1, 2, 3])
@pytest.mark.parametrize("at_start", [True, False])
def test_change_during_reading_is_noticed(tmp_path: Path, changes: int, *, at_start: bool) -> None:
    """If the file changes right after it was read, its last version is used in the end."""
    file = Edited(tmp_path / "web.yml")
    file.edits = []
    file.write_text(allowed(0))
    edits = [allowed(number) for number in range(1, changes + 1)]
    if at_start:
        file.edits = edits
        live = LiveConfig(file)
    else:
        live = LiveConfig(file)
        file.write_text(allowed(5))
        file.edits = edits
    for _ in range(changes + 1):
        live.current()
    limit = live.current().rate_limit

    assert edits == []
    assert limit is not None
    assert 10**changes == limit.burst
