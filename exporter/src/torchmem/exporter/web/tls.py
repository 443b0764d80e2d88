"""The `tls_server_config` of a web configuration file, as an SSL context of Python's ssl module."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchmem.sample.strict_yaml import Section, read_bytes
from torchmem.sample.untrusted import printable

_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_OLD_VERSIONS = ("TLS10", "TLS11")
# Go's names (crypto/tls, CipherSuites) and OpenSSL's. The suites of TLS 1.3 are always enabled, as
# in Go.
_TLS13_CIPHERS = (
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
)
_CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    **dict.fromkeys(_TLS13_CIPHERS, ""),
}
_DEFAULT_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2: forward secrecy and an AEAD
_CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}


@dataclass(frozen=True, slots=True)
class Tls:
    """A checked `tls_server_config`.

    `files` are the files it was read from. `allowed_sans` are subject alternative names of which a
    client's certificate must have one; empty admits any client.
    """

    KEYS: ClassVar[tuple[str, ...]] = (
        "cert_file",
        "key_file",
        "cert",
        "key",
        "client_auth_type",
        "client_ca_file",
        "client_ca",
        "client_allowed_sans",
        "min_version",
        "max_version",
        "cipher_suites",
        "curve_preferences",
        "prefer_server_cipher_suites",
    )
    files: tuple[Path, ...]
    context: ssl.SSLContext
    allowed_sans: frozenset[str]

    def admits(self, certificate: dict[str, Any] | None) -> bool:
        """Return whether a client with this certificate (`getpeercert` of ssl) may connect."""
        return not self.allowed_sans or any(
            name in self.allowed_sans for name in _names(certificate or {})
        )


def load_tls(section: Section, folder: Path) -> Tls:
    """Check the section and read its files; relative paths start at `folder`.

    Raises UsageError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = (_pem(section, name, folder, required=True) for name in ("cert", "key"))
    _limit_versions(context, section)
    _limit_ciphers(context, section)
    _limit_curves(context, section)
    _load_pair(context, certificate, key, section)
    _verify_clients(context, section, folder)
    files = tuple(
        folder / section.text(name)
        for name in ("cert_file", "key_file", "client_ca_file")
        if name in section
    )
    return Tls(files, context, _allowed_sans(context, section))


def _pem(section: Section, name: str, folder: Path, *, required: bool) -> bytes:
    """Return the content of `<name>_file`, or `<name>` itself."""
    path = section.text(f"{name}_file")
    if path and section.text(name):
        section.refuse(name, f"is given together with {name}_file: keep one of them.")
    if not path and not section.text(name) and required:
        section.refuse(f"{name}_file", "is missing: TLS needs a certificate and a key.")
    try:
        return read_bytes(folder / path) if path else section.text(name).encode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a PEM file"
        shown = printable(str(folder / path))
        section.refuse(
            f"{name}_file", f"cannot be read ({shown}: {reason}): check the path and the file mode."
        )


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes, section: Section) -> None:
    """Load certificate and key from files in memory, because OpenSSL reads only files.

    The empty password keeps OpenSSL from asking for one on the terminal.
    """
    try:
        with _in_memory(certificate) as certificate_path, _in_memory(key) as key_path:
            context.load_cert_chain(certificate_path, key_path, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "unreadable"
        name = "cert_file" if "cert_file" in section else "cert"
        section.refuse(
            name,
            f"and its key cannot be used ({reason}): "
            "give a PEM certificate and its key without a password.",
        )


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("torchmem", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _limit_versions(context: ssl.SSLContext, section: Section) -> None:
    for key in ("min_version", "max_version"):
        if section.text(key) in _OLD_VERSIONS:
            section.refuse(
                key,
                f"is {section.text(key)}, which OpenSSL no longer supports: give TLS12 or TLS13.",
            )
    lowest = section.choice("min_version", _VERSIONS, "TLS12")
    highest = section.choice("max_version", _VERSIONS, "TLS13")
    if lowest > highest:
        section.refuse("max_version", f"is {highest}, below min_version: give a higher one.")
    context.minimum_version, context.maximum_version = _VERSIONS[lowest], _VERSIONS[highest]


def _limit_ciphers(context: ssl.SSLContext, section: Section) -> None:
    if section.flag("prefer_server_cipher_suites", default=True):
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    suites = section.choices("cipher_suites", _CIPHERS)
    context.set_ciphers(":".join(filter(None, suites)) or _DEFAULT_CIPHERS)
    if any(suites):
        return
    if suites and context.maximum_version is ssl.TLSVersion.TLSv1_2:
        section.refuse("cipher_suites", "has no suite for TLS 1.2: add one or raise max_version.")
    if suites:
        context.minimum_version = ssl.TLSVersion.TLSv1_3


def _limit_curves(context: ssl.SSLContext, section: Section) -> None:
    curves = section.choices("curve_preferences", _CURVES)
    if len(curves) > 1:
        section.refuse(
            "curve_preferences",
            "has several curves, but Python's TLS supports only one: keep one or none.",
        )
    try:
        if curves:
            context.set_ecdh_curve(curves[0])
    except ValueError:
        section.refuse(
            "curve_preferences", "has a curve that this OpenSSL does not support: give CurveP256."
        )


def _verify_clients(context: ssl.SSLContext, section: Section, folder: Path) -> None:
    if section.text("client_auth_type") in _UNVERIFIED:
        section.refuse(
            "client_auth_type",
            f"is {section.text('client_auth_type')}, but Python's TLS verifies every certificate "
            "that it requests: give RequireAndVerifyClientCert with client_ca_file.",
        )
    mode = _CLIENT_AUTH[section.choice("client_auth_type", _CLIENT_AUTH, "NoClientCert")]
    authorities = _pem(section, "client_ca", folder, required=False)
    name = "client_ca" if "client_ca" in section else "client_ca_file"
    if authorities and mode is ssl.CERT_NONE:
        section.refuse(
            name,
            "has no effect without client_auth_type: add RequireAndVerifyClientCert.",
        )
    if mode is not ssl.CERT_NONE and not authorities:
        section.refuse("client_auth_type", "needs a certificate authority: add client_ca_file.")
    if authorities:
        _trust(context, authorities, section, name)
    context.verify_mode = mode


def _trust(context: ssl.SSLContext, authorities: bytes, section: Section, name: str) -> None:
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, ValueError):
        section.refuse(
            name,
            "has no certificate: give the PEM file of the clients' certificate authority.",
        )


def _allowed_sans(context: ssl.SSLContext, section: Section) -> frozenset[str]:
    names = frozenset(section.texts("client_allowed_sans"))
    if names and context.verify_mode is not ssl.CERT_REQUIRED:
        section.refuse(
            "client_allowed_sans", "needs client_auth_type: add RequireAndVerifyClientCert."
        )
    return names


def _names(certificate: dict[str, Any]) -> Iterator[str]:
    """Yield DNS names, email addresses, URIs, and IP addresses in their canonical form."""
    for kind, name in certificate.get("subjectAltName", ()):
        if kind == "IP Address":
            yield str(ipaddress.ip_address(name))
        elif kind in {"DNS", "email", "URI"}:
            yield name
