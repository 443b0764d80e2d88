"""Relative links and pictures of a Markdown page, rewritten for where the page is published."""

from __future__ import annotations

import re
from collections.abc import Callable

# Code, which stays as it is, or a link or a picture whose address is relative.
_CODE_OR_LINK = re.compile(
    r"^ *```.*?^ *```|`[^`]*`|(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
# From the address of a link, and whether it is a picture, to its new address; None for none.
Address = Callable[[str, bool], "str | None"]


def rewritten(text: str, address: Address) -> str:
    """Return the page with new addresses.

    A link without an address becomes plain text, and a picture without one is left out.
    """
    return _CODE_OR_LINK.sub(lambda match: _rewritten(match, address), text)


def in_repository(repository: str | None, path: str, picture: bool) -> str | None:
    """Return the address of a file of the repository, or None if the repository has no URL."""
    view = "raw" if picture else "blob"
    return f"{repository.rstrip('/')}/{view}/main/{path}" if repository else None


def _rewritten(match: re.Match[str], address: Address) -> str:
    picture, text, path = match.groups()
    if path is None:
        return match[0]
    new = address(path, bool(picture))
    if new is None:
        return "" if picture else text
    return f"{picture}[{text}]({new})"
