"""Finding a rank on the page: order, search, keys, links, and room, in a real Chromium."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from live.test_page import Known, dead_process, node_of, played
from support.browser import Page
from support.publishing import own_process, own_sample, publish

from torchmem.demo.node import SimulatedNode, uuid
from torchmem.exporter.server import serve
from torchmem.node.published import Published
from torchmem.simulator.scenarios import SCENARIOS

ROWS = "[...document.querySelectorAll('.rank .row .who')].map((who) => who.textContent)"
OPEN = "document.querySelector('.row[aria-expanded=true] .who')?.textContent"
TAB = "document.querySelector('[role=tab][aria-selected=true]')?.textContent"


@pytest.fixture
def node(page: Page, tmp_path: Path) -> Iterator[Page]:
    """The page of a node with 8 GPUs and 16 ranks, of which rank 5 died of an OOM."""
    ranks = [
        Published(
            own_sample(uuid(n % 8), own_process(rank=n, run=f"run-{n // 8}")),
            7000 + n,
            "oom" if n == 5 else "running",
            True,
            path=str(n),
        )
        for n in range(16)
    ]
    with closing(serve(Known(tmp_path, SimulatedNode(8).gpus(60.0), ranks))) as server:
        page.goto(server.url)
        page.wait("document.querySelectorAll('.rank .row').length === 16")
        yield page


def test_the_worst_rank_comes_first(page: Page, tmp_path: Path) -> None:
    """A rank that ran out of memory stands above those that ended well before it."""
    now = time.time()
    for number in range(3):
        ended = own_sample(uuid(1), dead_process(number, rank=number), ended="exited")
        publish(tmp_path, replace(ended, timestamp=now - 60))
    publish(tmp_path, own_sample(uuid(1), dead_process(3, rank=3), ended="oom"))
    with node_of(tmp_path) as server:
        page.goto(server.url)
        page.wait("document.querySelectorAll('.rank .row').length === 4")
        rows = page.evaluate(ROWS)
        titles = page.evaluate(
            "[...document.querySelectorAll('#gpus h2')].map((title) => title.textContent)"
        )

    assert rows == [f"rank {number} night" for number in (3, 0, 1, 2)]
    assert [title[:5] for title in titles] == ["GPU 1", "GPU 0"]


def test_the_head_leads_to_the_rank_that_died(node: Page) -> None:
    """“1 out of memory” opens it with its reasons, and brings it into view."""
    node.click("#summary button")
    node.wait(f"{OPEN} === 'rank 5 run-0' && {TAB} === 'Why'")
    top = node.evaluate(
        "document.querySelector('.row[aria-expanded=true]').getBoundingClientRect().top"
    )

    assert node.evaluate("document.querySelector('#summary button').textContent") == (
        "1 out of memory"
    )
    assert -1 <= top < 1000


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("run-1", [f"rank {n} run-1" for n in range(8, 16)]),
        ("rank:3", ["rank 3 run-0"]),
        ("out of memory", ["rank 5 run-0"]),
        ("state:oom run-1", []),
        ("run:run-0 7", ["rank 7 run-0"]),
        ("launch:1000-3f9a rank:9", ["rank 9 run-1"]),
        ("launch:3f9a", []),
    ],
)
def test_search(node: Page, search: str, found: list[str]) -> None:
    """Words match run, rank and state, and a launch by its name; Esc shows all ranks again."""
    node.press("/")
    for key in search:
        node.press(key if key != " " else "Space")
    node.wait(f"document.getElementById('found').textContent.startsWith('{len(found)} of 16')")
    assert sorted(node.evaluate(ROWS)) == sorted(found)
    assert node.axe() == []
    node.press("Escape")
    node.wait("document.querySelectorAll('.rank .row').length === 16")


def test_the_keys(node: Page) -> None:
    """One key each leads to the worst rank, the next one, and the tabs; the list names them."""
    node.press("w")
    node.wait(f"{OPEN} === 'rank 5 run-0' && {TAB} === 'Why'")
    node.press("1")
    node.wait(f"{TAB} === 'Now'")
    node.press("Escape")
    node.wait("document.querySelector('.details') === null")
    first = node.evaluate("document.activeElement.dataset.rank")
    node.press("j")
    assert node.evaluate("document.activeElement.dataset.rank") != first
    node.press("k")
    assert node.evaluate("document.activeElement.dataset.rank") == first

    node.press("?")
    node.wait("document.querySelector('dialog').open")
    assert "search" in node.evaluate("document.querySelector('dialog').innerText")
    assert node.axe() == []
    node.click("dialog input")
    node.press("Escape")
    node.wait("!document.querySelector('dialog').open")
    node.press("w")
    assert node.evaluate("document.querySelector('.details')") is None
    node.evaluate("localStorage.clear()")


def test_a_link_leads_to_its_rank(node: Page) -> None:
    """The address opens the same rank, tab and search; one of a rank that is gone says so."""
    node.press("w")
    node.wait(f"{OPEN} === 'rank 5 run-0'")
    address = node.evaluate("location.href")
    node.goto("about:blank")
    node.goto(address)
    node.wait(f"{OPEN} === 'rank 5 run-0' && {TAB} === 'Why'")
    assert node.evaluate("document.querySelector('.details .copy').textContent") == "Copy link"

    node.goto("about:blank")
    node.goto(address.replace("rank=", "rank=0"))
    node.wait("document.getElementById('notice').textContent.includes('is gone')")


def test_eight_gpus_have_room_on_one_screen(page: Page, tmp_path: Path) -> None:
    """Eight GPUs with a rank each fit into 1080 pixels, and the choice is the reader's."""
    names = list(SCENARIOS)
    gpus, items = zip(*(played(names[n], n) for n in range(8)), strict=True)
    page.resize(1920, 1080)
    with closing(serve(Known(tmp_path, list(gpus), list(items)))) as server:
        page.goto(server.url)
        page.wait("document.querySelectorAll('.rank .row').length === 8")
        height = page.evaluate("document.documentElement.scrollHeight")
        pressed = "document.getElementById('compact').getAttribute('aria-pressed')"
        assert page.evaluate(pressed) == "true"
        page.press("c")
        page.wait(f"{pressed} === 'false'")
        assert page.evaluate("document.documentElement.scrollHeight") > 1080

    assert height <= 1080


def test_an_exporter_that_does_not_respond(page: Page, tmp_path: Path) -> None:
    """The bars lose their color, the page says when it last heard, and tries with longer pauses."""
    publish(tmp_path, own_sample(uuid(0)))
    with node_of(tmp_path) as server:
        page.goto(server.url)
        page.wait("document.querySelector('.rank .row')")
        color = page.evaluate("getComputedStyle(document.querySelector('.gpu-bar')).filter")
    status = "document.getElementById('connection').textContent"
    times = r"Last seen \d\d:\d\d:\d\d\. Next try \d\d:\d\d:\d\d\."
    page.wait(f"/{times}/.test({status})")
    first = page.evaluate(status)
    page.wait(f"{status} !== '{first}'")

    assert color == "none"
    assert "grayscale" in page.evaluate(
        "getComputedStyle(document.querySelector('.gpu-bar')).filter"
    )
    assert page.evaluate("document.title").startswith("No answer")
    assert page.axe() == []
