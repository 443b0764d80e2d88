"""The pages of the documentation site, and their order: that of docs/README.md."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FRONT = "README.md"
INDEX = "docs/README.md"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+\.md)\)")
_SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page, or a section: a title and the entries in it, of which the first is its own page.

    source: the path of the page in the repository, with /; empty for a section without its own.
    """

    title: str
    source: str = ""
    entries: tuple[PageEntry, ...] = ()

    def sources(self) -> Iterator[str]:
        """Yield the pages of this entry."""
        if self.source:
            yield self.source
        for entry in self.entries:
            yield from entry.sources()


def navigation(root: Path) -> list[PageEntry]:
    """Return the front page, docs/README.md, and its sections with the pages that they link to.

    A page has its place where it is linked first. The index of a folder, such as
    docs/runbooks/README.md, is followed by the other pages of the folder. Raises ValueError if a
    page under docs/ has no place.
    """
    entries = [PageEntry("Home", FRONT), PageEntry("All documentation", INDEX)]
    seen = {FRONT, INDEX}
    _, *parts = _SECTION.split((root / INDEX).read_text(encoding="utf-8"))
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        entries.append(PageEntry(title, entries=tuple(_linked(root, INDEX, text, seen))))
    pages = {path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")}
    if missing := sorted(pages - seen):
        raise ValueError(f"{INDEX} has no link to {', '.join(missing)}: add one to a section.")
    return entries


def site_path(source: str) -> str:
    """Return where the site has a page or a picture: docs/runbooks/README.md → runbooks/index.md.

    The README is the site's front page, and docs/README.md a page beside it.
    """
    if source == INDEX:
        return "documentation.md"
    path = source.removeprefix("docs/")
    if PurePosixPath(path).name == "README.md":
        return posixpath.join(posixpath.dirname(path), "index.md")
    return path if source.startswith("docs/") else path.lower()


def _linked(root: Path, page: str, text: str, seen: set[str]) -> Iterator[PageEntry]:
    for title, link in _LINK.findall(text):
        source = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if source not in seen:
            seen.add(source)
            name = (title[0].upper() + title[1:]).replace("`", "")
            rest = tuple(_folder(root, source, seen)) if _is_index(source) else ()
            yield PageEntry(
                name, "" if rest else source, (PageEntry(name, source), *rest) if rest else ()
            )


def _folder(root: Path, index: str, seen: set[str]) -> Iterator[PageEntry]:
    """Yield the other pages of the folder: those that its index links to, then the others."""
    folder = posixpath.dirname(index)
    text = (root / index).read_text(encoding="utf-8")
    yield from (entry for entry in _linked(root, index, "".join(_links_within(text)), seen))
    for path in sorted((root / folder).glob("*.md")):
        yield from _linked(root, index, f"[{path.stem}]({path.name})", seen)


def _links_within(text: str) -> Iterator[str]:
    """Yield the links of a page to its own folder."""
    return (link[0] for link in _LINK.finditer(text) if "/" not in link[2])


def _is_index(source: str) -> bool:
    return PurePosixPath(source).name == "README.md"
