"""The label `launch`: the user's id, and a short hash of what only the ranks of a launch share.

The user's own process makes the hash. The exporter puts the id of the file's owner in front of it,
so a user cannot publish a rank of another user's launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

DIGITS = 8
"""Hexadecimal digits of the hash. Only launches of one user, with one name, have to differ."""

MAX_LENGTH = 10 + 1 + DIGITS
"""Characters of a launch; user IDs have 32 bits."""

_FORM = re.compile(rf"(?:0|[1-9][0-9]{{0,9}})-[0-9a-f]{{{DIGITS}}}", re.ASCII)


def launch_of(uid: int, facts: Iterable[str]) -> str:
    """Return the label of a launch of a user, such as 1000-3f9a2c71."""
    from hashlib import sha256  # 2 ms, only once CUDA is up

    text = "\0".join(facts).encode(errors="surrogateescape")
    return f"{uid}-{sha256(text).hexdigest()[:DIGITS]}"


def is_launch(text: str | None) -> bool:
    """Return whether a text has the form of a launch; None, for unknown, has it too."""
    return text is None or _FORM.fullmatch(text) is not None


def owned_launch(launch: str | None, uid: int) -> str | None:
    """Return the launch as one of the user who owns the file with it; None if it is unknown."""
    return None if launch is None else f"{uid}-{launch.rpartition('-')[2]}"
