"""The screen of `torchmem top`, drawn from a recorded state of a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from torchmem.metrics import colors
from torchmem.top.bars import LETTERS, UseStyles, scaled
from torchmem.top.node import AwayError, Node, Use, read
from torchmem.top.screen import Screen, drawn, page
from torchmem.top.view import ORDERS, View, keys, press

HERE = Path(__file__).parent
RECORDED = (HERE / "state.json").read_bytes()
URL = "http://127.0.0.1:9847"


@pytest.fixture
def node() -> Node:
    """Four ranks on five GPUs; one has run out of memory."""
    return read(RECORDED)


def console(width: int = 80, height: int = 24, *, colored: bool = False) -> Console:
    """Return a terminal of this size."""
    system: Any = "truecolor" if colored else None
    return Console(width=width, height=height, color_system=system, force_terminal=True)


def draw(screen: Screen, width: int = 80, height: int = 24) -> str:
    """Return the screen's text, without colors."""
    return drawn(screen, console(width, height)).plain


def without_trailing_spaces(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_screen(node: Node, width: int, height: int) -> None:
    """GPUs, ranks and all about the selected rank fit on small and large terminals."""
    text = draw(Screen(node, URL, View(order="headroom")), width, height)

    assert len(text.split("\n")) == height
    assert max(map(cell_len, text.split("\n"))) <= width
    assert without_trailing_spaces(text) == (HERE / f"golden/{width}x{height}.txt").read_text()


def test_one_page(node: Node) -> None:
    """--once prints every rank, and what there is to know about each."""
    text = page(Screen(node, URL), console()).plain

    assert without_trailing_spaces(text) == (HERE / "golden/once.txt").read_text()


def test_the_sample_in_the_documentation_is_real(root: Path) -> None:
    """docs/live-page.md shows the screen of a terminal with 80 columns."""
    page_text = (root / "docs" / "live-page.md").read_text()

    assert (HERE / "golden/80x24.txt").read_text() in page_text


def test_nothing_that_matters_is_cut_at_80x24(node: Node) -> None:
    """The selected rank's run, all its parts and all its reasons are on the screen."""
    view: View | None = View()
    for rank in [rank for gpu in node.gpus for rank in gpu.ranks]:
        assert view is not None
        text = " ".join(draw(Screen(node, URL, view)).split())
        labels = {entry.name: entry.label for entry in node.legend}
        for expected in (rank.run, *(why.text for why in rank.why)):
            assert expected in text
        for part in rank.parts:
            assert f"{LETTERS[part.name]} {labels[part.name]} " in text
        view = press(view, "down", view.groups(node))


@pytest.mark.parametrize("width", range(80, 100))
def test_a_full_screen_cuts_nothing(width: int) -> None:
    """With a long run's name, three reasons and twelve parts, all about the rank is readable."""
    document = json.loads(RECORDED)
    rank = document["gpus"][0]["ranks"][0]
    labels = {entry["name"]: entry["label"] for entry in document["legend"]}
    names = [name for name in labels if name not in {"driver", "free"}][:12]
    rank["run"] = "sweep/2026-11-22/" + 4 * "long-name-"
    rank["why"] = [{"text": f"Reason {number} {10 * 'is long '}."} for number in range(3)]
    rank["parts"] = [{"name": name, "bytes": 3 << 30} for name in names]
    text = draw(Screen(read(json.dumps(document).encode()), URL), width)
    detail = " ".join(text[text.index("──") :].split())

    assert "…" not in detail
    assert rank["run"] in detail
    assert all(why["text"] in detail for why in rank["why"])
    assert all(f"{labels[name]} 3.0" in detail for name in names)


def test_the_selected_rank_is_in_sight() -> None:
    """On a node with more ranks than lines, the list scrolls with the selection."""
    document = json.loads(RECORDED)
    rank = document["gpus"][0]["ranks"][0]
    document["gpus"][0]["ranks"] = [rank | {"id": str(n), "rank": n} for n in range(64)]
    node = read(json.dumps(document).encode())
    view: View | None = View()
    for _ in range(64):
        assert view is not None
        text = draw(Screen(node, URL, view))
        assert text.count("▶") == 1
        assert "of 72" in text.splitlines()[-1]
        view = press(view, "j", view.groups(node))


@given(
    sizes=st.lists(st.integers(0, 1 << 40), max_size=12),
    rest=st.integers(1, 1 << 40),
    width=st.integers(1, 200),
)
def test_a_bar_adds_up_to_its_width(sizes: list[int], rest: int, width: int) -> None:
    """A bar is exactly as wide as asked, and no part is off by more than a column."""
    total = sum(sizes) + rest
    names = [f"part{at}" for at in range(len(sizes))]
    columns = scaled([Use(*pair) for pair in zip(names, sizes, strict=True)], total, width)

    assert len(columns) == width
    for name, size in zip(names, sizes, strict=True):
        assert abs(columns.count(name) - width * size / total) <= 1


def test_a_bar_has_the_colors_of_the_legend() -> None:
    """Parts are drawn in the colors of the dashboards; half columns have both neighbors' colors."""
    looks = UseStyles([], has_colors=True)
    bar = looks.bar([Use("stranded", 3), Use("driver", 5)], 8, 4)
    used = [
        (str(span.style.color and span.style.color.name), _background(span.style))
        for span in bar.spans
        if not isinstance(span.style, str)
    ]

    stranded, driver = colors.PARTS["stranded"], colors.PARTS["driver"]
    assert bar.plain == "█▌██"
    assert used == [(stranded, None), (stranded, driver), (driver, None), (driver, None)]


def _background(style: Any) -> str | None:
    return style.bgcolor.name if style.bgcolor else None


def test_every_part_has_a_letter_of_its_own() -> None:
    """Without colors, the parts of a bar can still be told apart."""
    assert set(UseStyles([], has_colors=False).names) == set(LETTERS)
    assert len(set(LETTERS.values())) == len(LETTERS)


HOSTILE = st.text(max_size=60) | st.sampled_from(
    [
        "\x1b[2J\x1b]0;x\x07",
        "[bold red]x[/]",
        "日本語" * 20,
        "a\n\tb\r",
        "\u202e\u0301",
        "👩‍👩‍👧" * 9,
    ]
)


@settings(max_examples=30, deadline=None)
@given(text=HOSTILE)
def test_hostile_names_are_text(text: str) -> None:
    """Control characters never reach the terminal, markup is text, and no line is too wide."""
    document = json.loads(RECORDED)
    for rank in document["gpus"][0]["ranks"]:
        rank |= {"run": text, "script": text, "why": [{"text": text}]}
    document["node"] = document["gpus"][0]["name"] = text
    screen = Screen(read(json.dumps(document).encode()), URL)
    for colored in (True, False):
        lines = drawn(screen, console(colored=colored)).plain.split("\n")
        assert len(lines) == 24
        assert all(line.isprintable() for line in lines)
        assert max(map(cell_len, lines)) <= 80


def test_markup_is_text() -> None:
    """A run's name in rich's markup is shown as it is."""
    changed = RECORDED.replace(b"nightly-7b", b"[red]x[/red]")

    assert "[red]x[/red]" in draw(Screen(read(changed), URL), 120)


def without_each_key(value: Any) -> Iterator[Any]:
    """Yield the JSON value without each key of its objects, of lists only in the first item."""
    if isinstance(value, dict):
        for key, item in value.items():
            rest = {name: other for name, other in value.items() if name != key}
            yield rest
            yield from ({**rest, key: changed} for changed in without_each_key(item))
    elif isinstance(value, list) and value:
        yield from ([changed, *value[1:]] for changed in without_each_key(value[0]))


def test_any_field_may_be_absent() -> None:
    """What an older exporter does not send is unknown, and what a newer one adds is ignored."""
    documents = [*without_each_key(json.loads(RECORDED)), {}, {"schema": 9, "new": [1]}]
    assert len(documents) > 50
    for document in documents:
        screen = Screen(read(json.dumps(document).encode()), URL)
        assert len(draw(screen).split("\n")) == 24
        assert page(screen, console()).plain


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"gpus": 3}', b"\xff", b"[" * 99999])
def test_other_answers_are_no_state(body: bytes) -> None:
    """What is not a state is reported as such."""
    with pytest.raises(AwayError, match="not with a state"):
        read(body)


def test_an_exporter_that_is_away(node: Node) -> None:
    """The last state stays, and a line says since when the exporter has not answered."""
    text = draw(Screen(node, URL, away="does not respond: Connection refused", away_seconds=7))

    sentence = f"{URL} does not respond: Connection refused. Retrying for 7 s."
    assert sentence in " ".join(text.split())
    assert "nightly-7b" in text


def test_orders(node: Node) -> None:
    """`s` changes the order: by rank, by least headroom, by most reserved memory."""
    view: View | None = View()
    ranks = {rank.id: rank for gpu in node.gpus for rank in gpu.ranks}
    seen = {}
    for order in ORDERS:
        assert view is not None
        seen[order] = [ranks[id_] for _, id_ in keys(view.groups(node))]
        view = press(view, "s", [])

    assert view == View()
    assert [rank.rank for rank in seen["rank"]] == [0, 1, 2, 3]
    headrooms = [rank.headroom_flush_bytes or 0 for rank in seen["headroom"]]
    assert headrooms == sorted(headrooms)
    reserved = [rank.reserved_bytes or 0 for rank in seen["reserved"]]
    assert reserved == sorted(reserved, reverse=True)


def test_the_selection_stays_with_its_rank(node: Node) -> None:
    """Another order moves the selected rank, and it stays selected."""
    view = View()
    for key in ("end", "s"):
        view = press(view, key, view.groups(node)) or view
    selected = next(line for line in draw(Screen(node, URL, view)).split("\n") if "▶" in line)

    assert selected.split()[1] == "3"


def test_the_filter(node: Node) -> None:
    """Typed letters filter by run, and are not commands; Escape shows all ranks again."""
    view: View | None = View()
    for key in ("/", "q", "s", "backspace", "x", "enter"):
        assert view is not None
        view = press(view, key, view.groups(node))
    assert view is not None
    assert view.filter == "qx"
    assert "No run has 'qx' in its name" in draw(Screen(node, URL, view))
    assert View() == press(view, "escape", [])
    assert len(keys(View(filter="NIGHT").groups(node))) == 4
