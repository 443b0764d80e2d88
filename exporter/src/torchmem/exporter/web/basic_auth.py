"""Names and passwords: a wrong one takes as long for an unknown name, a right one costs bcrypt only once."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt

MAX_WAITING = 8
_BCRYPT_BYTES = 72  # bcrypt looks at no more of a password; Go's and htpasswd cut there too


class BusyError(Exception):
    """More passwords wait to be checked than one core gets through."""


class BasicAuth:
    """Checks the Authorization header, one bcrypt at a time so that guessing takes one core at most.

    Only proven passwords are remembered, as keyed digests, so a stranger cannot make the memory grow.
    """

    def __init__(self, check: Callable[[bytes, str], bool] | None = None) -> None:
        self._check = check or _check
        self._key = secrets.token_bytes(32)
        self._proven: dict[str, bytes] = {}
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchmem-bcrypt")

    async def admits(self, header: str | None, users: Mapping[str, str]) -> bool:
        """Whether the header proves one of `users` (name to bcrypt hash); raises BusyError."""
        given = credentials(header)
        if given is None:
            return False
        name, password = given
        known = users.get(name)
        proof = self._digest(name, known or "", password)
        if known and hmac.compare_digest(self._proven.get(name, b""), proof):
            return True
        if not await self._matches(password, known or _decoy(users)) or not known:
            return False
        self._proven = {user: digest for user, digest in self._proven.items() if user in users} | {
            name: proof
        }
        return True

    async def _matches(self, password: bytes, hashed: str) -> bool:
        if self._waiting >= MAX_WAITING:
            raise BusyError
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._check, password, hashed)
        finally:
            self._waiting -= 1

    def _digest(self, name: str, hashed: str, password: bytes) -> bytes:
        parts = (name.encode(), hashed.encode(), password)
        return hmac.digest(
            self._key, b"".join(hashlib.sha256(part).digest() for part in parts), "sha256"
        )


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """Name and password of RFC 7617, None when the header is no such thing."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _check(password: bytes, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed.encode())
    except ValueError:
        return False


def _decoy(users: Mapping[str, str]) -> str:
    """A hash that nothing matches, as dear as the dearest of `users`."""
    return max(users.values(), key=lambda hashed: int(hashed[4:6]))[:7] + "." * 53
