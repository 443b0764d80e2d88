"""What is wrong with the pages of a built site."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that load what they name.
_LOADED = {"script", "img", "source", "iframe", "video"}


class _Page(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the address and the id."""
        values = {name: value for name, value in attrs if value is not None}
        kind = "loaded" if tag in _LOADED or values.get("rel") == "stylesheet" else "linked"
        for name in {"href", "src"} & values.keys():
            self.links.append((kind, values[name]))
        self.anchors |= {values[name] for name in {"id", "name"} & values.keys()}


def problems(site: Path) -> list[str]:
    """Return a line for each link, picture or anchor that leads nowhere, and for each file that a
    page loads from another host.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    return [
        f"{path.relative_to(site)}: {address} {problem}"
        for path in sorted(pages)
        for kind, address in pages[path].links
        for problem in _problems(site, pages, path, kind, address)
    ]


def _problems(
    site: Path, pages: dict[Path, _Page], page: Path, kind: str, address: str
) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        if kind == "loaded" and parts.scheme != "data":
            yield "is loaded from another host"
        return
    # A page for what was not found has the addresses of the site's root.
    base = site if parts.path.startswith("/") else page.parent
    target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        yield "leads nowhere"
    elif (
        parts.fragment and target in pages and unquote(parts.fragment) not in _known(pages[target])
    ):
        yield "has no such anchor"


def _known(page: _Page) -> set[str]:
    return page.anchors | {"__top"}
