"""Certificates for tests: an authority, and certificates for servers and clients."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """An authority that writes the certificates it issues to `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA(organization_name=name)
        self.file = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *identities: str, days: int = 1) -> Pair:
        """Issue a certificate for these names or addresses, in `<name>.pem` and `<name>.key`."""
        until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=days)
        issued = self._authority.issue_cert(
            *(identities or ("localhost", "127.0.0.1")), not_after=until
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(pair.key))
        return pair
