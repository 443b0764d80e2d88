"""The documentation site: its navigation, its links, and the addresses that alerts link to."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deploy.site import build
from deploy.site.check import problems
from deploy.site.navigation import PageEntry, navigation, site_path

from torchmem.explain.thresholds import Thresholds, defaults
from torchmem.manifests.render import render

REPOSITORY = "https://git.example.org/torchmem"
PAGES = {"README.md", "docs/README.md", "docs/sdk.md", "docs/runbooks/A.md", "CONTRIBUTING.md"}


def tree(root: Path, **texts: str) -> Path:
    """Write the index and pages of a small repository; __ in a name is a /."""
    for name, text in texts.items():
        path = root / "docs" / f"{name.replace('__', '/')}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_navigation_is_that_of_the_index(tmp_path: Path) -> None:
    """Sections and titles are those of docs/README.md; a page stands where it is linked first."""
    index = (
        "| [x](b.md) |\n\n## First\n\n- [The a](a.md): see [b](b.md#x)\n\n"
        "## Second\n\n- [again](a.md), [b](b.md) and [`changes`](../CHANGELOG.md)\n"
    )

    _, _, *sections = navigation(tree(tmp_path, README=index, a="# A", b="# B"))

    assert sections == [
        PageEntry("First", entries=(PageEntry("The a", "docs/a.md"),)),
        PageEntry(
            "Second", entries=(PageEntry("B", "docs/b.md"), PageEntry("changes", "CHANGELOG.md"))
        ),
    ]


def test_the_index_of_a_folder_is_followed_by_its_pages(tmp_path: Path) -> None:
    """First come the pages that the index of the folder links to, then the others by name."""
    index = "## First\n\n- [Books](books/README.md)\n"
    books = "[Two](b.md), and [elsewhere](../README.md)"

    *_, section = navigation(
        tree(tmp_path, README=index, books__README=books, books__b="", books__a="", books__c="")
    )

    assert list(section.sources()) == [
        f"docs/books/{name}.md" for name in ("README", "b", "a", "c")
    ]


def test_a_page_without_a_place_is_an_error(tmp_path: Path) -> None:
    """The error names the page and what to do."""
    with pytest.raises(ValueError, match=r"no link to docs/lost\.md: add one to a section"):
        navigation(tree(tmp_path, README="## First\n", lost="# Lost"))


def test_every_page_has_one_place(root: Path) -> None:
    """Each page under docs/ is in the navigation once, and so are the pages beside it."""
    sources = [source for entry in navigation(root) for source in entry.sources()]
    pages = {path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")}

    assert sorted(sources) == sorted(
        pages | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    )
    assert len({site_path(source) for source in sources}) == len(sources)


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](docs/sdk.md#x)", "[a](sdk.md#x)"),
        ("README.md", "[a](docs/README.md)", "[a](documentation.md)"),
        ("docs/sdk.md", "[a](../README.md#x) [b](#y)", "[a](index.md#x) [b](#y)"),
        ("docs/sdk.md", "[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("docs/runbooks/A.md", "[a](../sdk.md)", "[a](../sdk.md)"),
        ("README.md", "![a](docs/pictures/a.png)", "![a](pictures/a.png)"),
        ("docs/sdk.md", "[a](../deploy/b)", f"[a]({REPOSITORY}/blob/main/deploy/b)"),
        ("docs/sdk.md", "[a](https://b.example)", "[a](https://b.example)"),
        ("docs/sdk.md", "`[a](b.md)`", "`[a](b.md)`"),
        ("docs/sdk.md", "```\n[a](b.md)\n```", "```\n[a](b.md)\n```"),
    ],
)
def test_links_have_the_addresses_of_the_site(source: str, text: str, expected: str) -> None:
    """Links to pages and pictures are relative, others lead to the repository; code is kept."""
    assert build.page(text, source, PAGES, REPOSITORY) == expected


def test_links_to_a_repository_without_a_url_become_text() -> None:
    """A link to a file outside of docs/ becomes its text, which may be code."""
    assert build.page("see [`b`](../deploy/b)", "docs/sdk.md", PAGES, None) == "see `b`"


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="b/">', "leads nowhere"),
        ('<img src="b.png">', "leads nowhere"),
        ('<a href="#b">', "has no such anchor"),
        ('<a href="a/#b">', "has no such anchor"),
        ('<script src="https://b.example/c.js"></script>', "is loaded from another host"),
        ('<link rel="stylesheet" href="https://b.example/c">', "is loaded from another host"),
    ],
)
def test_the_check_finds_what_is_wrong(html: str, problem: str, tmp_path: Path) -> None:
    """A link, picture or anchor that leads nowhere is named, and a file of another host."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<p id="c">')
    (tmp_path / "index.html").write_text(f'<a href="a/#c"><a href="https://d.example">{html}')
    address = re.findall(r'(?:href|src)="([^"]+)"', html)[0]

    assert problems(tmp_path) == [f"index.html: {address} {problem}"]


def runbook_urls(site: str) -> set[str]:
    """Return the links of all alerts whose runbooks are at a site."""
    shipped = defaults()
    values = {**shipped.values, "runbooks_at": f"{site}/runbooks"}
    files = render(Thresholds(values, shipped.overrides)).values()
    groups = [group for text in files for group in yaml.safe_load(text)["groups"]]
    return {
        rule["annotations"]["runbook_url"]
        for group in groups
        for rule in group["rules"]
        if "alert" in rule
    }


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder like any web server, and yield its URL."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def opened(browser: httpx.Client, url: str) -> str:
    """Return the title of the page that a browser shows at a URL, after all redirections."""
    page = browser.get(url, follow_redirects=True).raise_for_status()
    refresh = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', page.text)
    if refresh:
        return opened(browser, str(page.url.join(refresh[1])))
    return page.text.partition("<title>")[2].partition("<")[0]


def test_the_links_of_alerts_open_the_pages_of_the_site(root: Path, tmp_path: Path) -> None:
    """With the site's URL as `runbooks_at`, the link NAME.md of each alert opens its page."""
    for path in (root / "docs" / "runbooks").glob("Torchmem*.md"):
        folder = tmp_path / "runbooks" / path.stem
        folder.mkdir(parents=True)
        (folder / "index.html").write_text(f"<title>{path.stem}</title>")
    build.add_runbook_addresses(tmp_path)

    assert problems(tmp_path) == []
    with served(tmp_path) as site, httpx.Client(timeout=60) as browser:
        for url in runbook_urls(site):
            assert opened(browser, url) == Path(url).stem


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built in strict mode without a warning."""
    python = root / ".venv-site" / "bin" / "python"
    if not python.exists():
        pytest.skip("the site's generator is not installed: make site")
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        [python, "-m", "deploy.site.build", "--out", folder],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "No issues found" in done.stderr) == (0, True), done.stderr
    return folder


def test_the_site_has_every_page(site: Path, root: Path) -> None:
    """Each page of the navigation is on the site, and the search finds it."""
    paths = {
        site_path(source).removesuffix("index.md").removesuffix(".md").rstrip("/")
        for entry in navigation(root)
        for source in entry.sources()
    }
    index = json.loads((site / "search.json").read_text())
    found = {item["location"].partition("#")[0].rstrip("/") for item in index["items"]}

    assert {path for path in paths if not (site / path / "index.html").exists()} == set()
    assert paths - found == set()


def test_every_page_is_in_the_navigation_of_the_site(site: Path) -> None:
    """From the front page, links lead to every page."""
    assert problems(site) == []
    reached: set[Path] = set()
    new = {site / "index.html"}
    while new:
        reached |= new
        links = {
            (page.parent / link / "index.html").resolve()
            for page in new
            for link in re.findall(r'href="([^":#]*)(?:#[^"]*)?"', page.read_text())
        }
        new = {path for path in links if path.exists()} - reached

    pages = {path for path in site.rglob("index.html") if not path.parent.name.endswith(".md")}
    assert pages - reached == set()


def test_the_alerts_open_the_built_pages(site: Path) -> None:
    """The link of each alert opens the page of its runbook."""
    with served(site) as url, httpx.Client(timeout=60) as browser:
        for link in runbook_urls(url):
            assert Path(link).stem in opened(browser, link)
