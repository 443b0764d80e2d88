"""Build the documentation site from docs/ into site/: `make site`."""

from __future__ import annotations

import argparse
import json
import posixpath
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from deploy.links import in_repository, rewritten
from deploy.site.check import problems
from deploy.site.navigation import PageEntry, navigation, site_path
from deploy.urls import project_urls

ROOT = Path(__file__).resolve().parents[2]
_STYLES = Path(__file__).with_name("site.css")
# As on GitHub: its anchors, and no meaning for anything that has none there.
_MARKDOWN = {
    "attr_list": {},
    "tables": {},
    "sane_lists": {},
    "toc": {
        "permalink": True,
        "toc_depth": "2-3",
        "slugify": {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}},
    },
    "pymdownx.highlight": {"pygments_lang_class": True},
    "pymdownx.superfences": {},
}
# These name many subjects and answer no question.
_INDEXES = ("CHANGELOG.md", "docs/README.md")
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_FEATURES = [
    "content.code.copy",
    "navigation.footer",
    "navigation.indexes",
    "navigation.path",
    "navigation.prune",
    "navigation.sections",
    "navigation.top",
    "search.highlight",
    "toc.follow",
]


def _palette(scheme: str, other: str) -> dict[str, Any]:
    return {
        "media": f"(prefers-color-scheme: {'light' if scheme == 'default' else 'dark'})",
        "scheme": scheme,
        "toggle": {"icon": f"lucide/{'sun' if scheme == 'default' else 'moon'}", "name": other},
    }


def configuration(entries: list[PageEntry], urls: dict[str, str]) -> str:
    """Return the configuration of the generator as YAML, of which JSON is a part.

    urls: [project.urls] of pyproject.toml. Fonts are the system's, so that a page loads nothing
    from other hosts.
    """
    settings = {
        "site_name": "torchmem",
        "site_description": "Prometheus monitoring for PyTorch GPU memory",
        "site_url": urls.get("Documentation", ""),
        "repo_url": urls.get("Repository", ""),
        "docs_dir": "pages",
        "site_dir": "site",
        "extra_css": [_STYLES.name],
        "theme": {
            "font": False,
            "features": _FEATURES,
            "palette": [
                _palette("default", "Switch to dark mode"),
                _palette("slate", "Switch to light mode"),
            ],
        },
        "nav": [_nav(entry) for entry in entries],
        "markdown_extensions": [{name: options} for name, options in _MARKDOWN.items()],
    }
    return json.dumps({key: value for key, value in settings.items() if value}, indent=1)


def page(text: str, source: str, pages: set[str], repository: str | None) -> str:
    """Return a page of the repository with the links of the site.

    Links to other pages and pictures of docs/ stay relative. Links to other files lead to the
    repository.
    """
    return rewritten(text, partial(_address, source, pages, repository))


def stage(root: Path, work: Path, urls: dict[str, str]) -> None:
    """Write what the generator reads: configuration, pages, pictures. Raises ValueError."""
    entries = navigation(root)
    sources = [source for entry in entries for source in entry.sources()]
    for source in sources:
        text = (root / source).read_text(encoding="utf-8")
        text = page(text, source, set(sources), urls.get("Repository"))
        text = _NOT_SEARCHED + text if source in _INDEXES else text
        _write(work / "pages" / site_path(source), text)
    for path in (path for kind in ("png", "webp") for path in (root / "docs").rglob(f"*.{kind}")):
        copy = work / "pages" / site_path(path.relative_to(root).as_posix())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    shutil.copyfile(_STYLES, work / "pages" / _STYLES.name)
    _write(work / "mkdocs.yml", configuration(entries, urls))


def add_runbook_addresses(site: Path) -> None:
    """Make each runbook's address NAME.md, which alerts link to, lead to its page.

    A file NAME.md would be served as text, so it is a folder with a page, as any web server shows.
    """
    for folder in sorted((site / "runbooks").glob("*/")):
        name = folder.name
        _write(
            site / "runbooks" / f"{name}.md" / "index.html",
            f'<!doctype html>\n<meta charset="utf-8">\n<title>{name}</title>\n'
            f'<meta name="robots" content="noindex">\n<link rel="canonical" href="../{name}/">\n'
            f'<meta http-equiv="refresh" content="0; url=../{name}/">\n'
            f'<a href="../{name}/">{name}</a>\n',
        )


def build(root: Path, work: Path, site: Path) -> int:
    """Build the site in the folder `work`, and move it; return 0 if nothing is wrong with it."""
    stage(root, work, project_urls(root))
    generator = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run([*generator, "--config-file", work / "mkdocs.yml"], check=False)
    if built.returncode:
        return built.returncode
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(work / "site", site)
    add_runbook_addresses(site)
    found = problems(site)
    print("\n".join(found) or f"The site is in {site}.")
    return int(bool(found))


def main(arguments: list[str] | None = None) -> int:
    """Build the site, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("site"))
    site = parser.parse_args(arguments).out
    try:
        with tempfile.TemporaryDirectory() as work:
            return build(ROOT, Path(work), site)
    except ValueError as error:
        print(f"site: {error}", file=sys.stderr)
        return 2


def _nav(entry: PageEntry) -> Any:
    if entry.entries:
        first, *rest = entry.entries
        nested = first.title == entry.title
        own = [site_path(first.source)] if nested else [_nav(first)]
        return {entry.title: [*own, *map(_nav, rest)]}
    return {entry.title: site_path(entry.source)}


def _address(
    source: str, pages: set[str], repository: str | None, link: str, picture: bool
) -> str | None:
    path, hash_, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target not in pages and not (picture and target.startswith("docs/")):
        return in_repository(repository, f"{target}{hash_}{anchor}", picture)
    here = posixpath.dirname(site_path(source))
    return f"{posixpath.relpath(site_path(target), here or '.')}{hash_}{anchor}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
