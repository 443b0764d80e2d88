"""The screen of `torchmem top`, drawn from a recorded state of a node."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from torchmem.cli.exporter import AwayError, ask_rank, read
from torchmem.cli.http import HttpAnswer
from torchmem.explain.parts import PartBytes
from torchmem.metrics import colors
from torchmem.metrics.memory_parts import PARTS
from torchmem.node.state import GpuNote, NodeState, RankWhy
from torchmem.top.bars import GIB, LETTERS, UseStyles, scaled
from torchmem.top.columns import COLUMNS, GPU_VALUES
from torchmem.top.history import SECONDS, SeenHistory
from torchmem.top.keys import KEYS
from torchmem.top.screen import Screen, drawn, last_line, page, picture
from torchmem.top.start import EXPORTER_WAYS, RANK_WAYS
from torchmem.top.view import ORDERS, RankKey, View, keys, out_of_memory, press

HERE = Path(__file__).parent
RECORDED = (HERE / "state.json").read_bytes()
ANSWER = (HERE / "answer.json").read_bytes()
URL = "http://127.0.0.1:9847"
MEANING = PARTS["stranded"].meaning


@pytest.fixture
def node() -> NodeState:
    """Four ranks on five GPUs; one has run out of memory."""
    return read(RECORDED)


def answers(node: NodeState) -> dict[RankKey, RankWhy]:
    """Return what the exporter answered about the rank that ran out of memory."""
    (key,) = out_of_memory(node)
    answer = ask_rank(URL, *key, lambda _: HttpAnswer(200, None, ANSWER))
    assert answer is not None
    return {key: answer}


def with_ranks(number: int) -> dict[str, Any]:
    """Return a document with this number of running ranks, each on a GPU of its own."""
    document: dict[str, Any] = json.loads(RECORDED)
    gpu = document["gpus"][0]
    gpus = [json.loads(json.dumps(gpu)) for _ in range(number)]
    for at, each in enumerate(gpus):
        each |= {"index": at, "uuid": f"GPU-{at}"}
        each["ranks"][0] |= {"id": str(at), "rank": at}
    document["gpus"] = gpus
    return document


def seen(document: dict[str, Any], polls: int) -> tuple[NodeState, SeenHistory]:
    """Return the state after a number of polls, one in 5 seconds, and what was seen of it."""
    history, start = SeenHistory(), document["time"]
    for poll in range(polls):
        node = read(json.dumps(document | {"time": start + 5 * poll}).encode())
        history.add(node)
    return node, history


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
def test_the_screen(node: NodeState, width: int, height: int) -> None:
    """GPUs, ranks and all about the selected rank fit on small and large terminals."""
    screen = Screen(node, URL, View(order="headroom"), answers=answers(node))
    text = draw(screen, width, height)

    assert len(text.split("\n")) == height
    assert max(map(cell_len, text.split("\n"))) <= width
    assert without_trailing_spaces(text) == (HERE / f"golden/{width}x{height}.txt").read_text()


def test_one_page(node: NodeState) -> None:
    """--once prints every rank, and what there is to know about each."""
    text = page(Screen(node, URL, answers=answers(node)), console()).plain

    assert without_trailing_spaces(text) == (HERE / "golden/once.txt").read_text()


def test_it_says_that_ranks_are_missing() -> None:
    """What the exporter says about ranks that it cannot show is above those that it shows."""
    node = read(json.dumps(json.loads(RECORDED) | {"missing": "Ranks are missing: why."}).encode())
    text = page(Screen(node, URL), console()).plain

    assert text.splitlines()[1].strip() == "Ranks are missing: why."


def test_who_holds_a_gpu_and_should_not(node: NodeState) -> None:
    """A note of a GPU is below its bar, and on a page at full length with the GPU's name."""
    note = GpuNote("dead_processes", "5 GiB is held by 1 process that is gone.", "End it. " * 20)
    noted = replace(node, gpus=(replace(node.gpus[0], notes=(note,)), *node.gpus[1:]))
    lines = draw(Screen(noted, URL)).splitlines()
    whole = " ".join(page(Screen(noted, URL), console()).plain.split())

    at = next(at for at, line in enumerate(lines) if line.startswith("GPU 0"))
    assert lines[at + 1].startswith("  • 5 GiB is held by 1 process that is gone. End it.")
    assert f"• GPU 0: {note.text} {note.remedy.strip()}" in whole


def test_nothing_that_matters_is_cut_at_80x24(node: NodeState) -> None:
    """The selected rank's run, all its parts and all its reasons are on the screen."""
    view: View | None = View(selected=keys(View().groups(node))[0])
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
    view = View(selected=(document["gpus"][0]["uuid"], rank["id"]))
    text = draw(Screen(read(json.dumps(document).encode()), URL, view), width)
    detail = " ".join(text[text.index("──") :].split())

    assert "…" not in detail
    assert rank["run"] in detail
    assert all(why["text"] in detail for why in rank["why"])
    assert all(f"{labels[name]} 3.0" in detail for name in names)


@pytest.mark.parametrize("size", [-16 * GIB, 700 * GIB])
def test_impossible_bytes_are_not_shown(size: int) -> None:
    """A part below zero, or larger than its GPU, is unknown, whatever the exporter says."""
    document = json.loads(RECORDED)
    for gpu in document["gpus"]:
        for part in gpu["parts"]:
            part["bytes"] = size if part["name"] == "free" else part["bytes"]
        for rank in gpu["ranks"]:
            rank["reserved_bytes"] = -GIB
    text = draw(Screen(read(json.dumps(document).encode()), URL))

    assert "– of 80.0 free" in text
    assert f"{size // GIB}.0" not in text
    assert "-1.0" not in text


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
    columns = scaled([PartBytes(*pair) for pair in zip(names, sizes, strict=True)], total, width)

    assert len(columns) == width
    for name, size in zip(names, sizes, strict=True):
        assert abs(columns.count(name) - width * size / total) <= 1


def test_a_bar_has_the_colors_of_the_legend() -> None:
    """Parts are drawn in the colors of the dashboards; half columns have both neighbors' colors."""
    looks = UseStyles([], has_colors=True)
    bar = looks.bar([PartBytes("stranded", 3), PartBytes("driver", 5)], 8, 4)
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
    """Yield the JSON value without each key of its objects, of lists only in the first item.

    Parts, legends and warnings keep what they are not without.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if key in {"name", "bytes", "text"} and "uuid" not in value:
                continue
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


def test_an_exporter_that_is_away(node: NodeState) -> None:
    """The last state stays, and the first line says since when it is old, and that it retries."""
    died = 1795370592.0
    away = "does not respond: Connection refused"
    text = draw(Screen(node, URL, away=away, away_seconds=7, seen=died))

    clock = time.strftime("%H:%M:%S", time.localtime(died))
    sentence = f"OUT OF DATE: {URL} {away}. Last seen {clock}. Retrying for 7.0 s."
    assert sentence in " ".join(text.splitlines()[1:3])
    assert "nightly-7b" in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_exporter(width: int) -> None:
    """Where no exporter has ever answered, the screen says how to start one or pass another."""
    text = draw(Screen(None, URL, away="does not respond: x", is_silent=True), width)

    assert f"{URL} does not respond: x." in text
    assert all(line in text and use in text for line, use in EXPORTER_WAYS)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_ranks(width: int) -> None:
    """A node without ranks has its GPUs, and the three ways to start a rank."""
    document = with_ranks(2)
    for gpu in document["gpus"]:
        gpu["ranks"] = []
    text = draw(Screen(read(json.dumps(document).encode()), URL), width)

    assert "GPU 1" in text
    assert len(RANK_WAYS) == 3
    assert all(line in text and use in text for line, use in RANK_WAYS)


def test_narrow_terminals_keep_what_tells_of_danger(node: NodeState) -> None:
    """With 60 columns, FI, retries and OOMs are there; with fewer, no line is too wide."""
    lines = draw(Screen(node, URL), 60, 20).split("\n")
    rank = next(line for line in lines if "▶" in line)

    assert lines[1].split()[-3:] == ["FI", "retries", "OOMs"]
    assert rank.split()[-3:] == ["0.99", "12", "1"]
    assert "headroom" in lines[1]


@pytest.mark.parametrize("height", [1, 2, 5, 24, 90])
@pytest.mark.parametrize("width", [1, 10, 40, 60, 160])
@pytest.mark.parametrize("ranks", [0, 1, 64])
def test_every_size(ranks: int, width: int, height: int) -> None:
    """Whatever the size and the number of ranks, the screen is filled exactly."""
    screen_node, history = seen(with_ranks(ranks), 3)
    for view in (View(), View(is_help=True), View(is_open=True), View(is_typing=True)):
        for away in (None, "does not respond"):
            screen = Screen(screen_node, URL, view, away=away, history=history, is_silent=True)
            lines = draw(screen, width, height).split("\n")
            assert len(lines) == height
            assert max(map(cell_len, lines)) <= width


def test_a_large_terminal_uses_its_rows() -> None:
    """At 160×50, each of eight ranks has its history and what threatens it most."""
    screen_node, history = seen(with_ranks(8), 20)
    text = draw(Screen(screen_node, URL, history=history), 160, 50)

    (why, *_) = screen_node.gpus[0].ranks[0].why
    assert text.count("reserved ▇") + text.count("reserved ▆") == 8
    assert text.count("in 1 min 35 s") == 8
    assert text.count(f"       • {why.text}") == 8


def test_the_history_is_bounded() -> None:
    """Only the last ten minutes of ranks that are still there are kept."""
    screen_node, history = seen(with_ranks(2), 200)
    (first, second) = keys(View().groups(screen_node))
    times = [point.time for point in history.of(first)]
    history.add(read(json.dumps(with_ranks(1)).encode()))

    assert times[-1] - times[0] == SECONDS
    assert history.of(second) == ()


def test_after_an_oom(node: NodeState) -> None:
    """At 80×24 the rank that ran out of memory is selected: what happened, verdict and advice."""
    text = " ".join(draw(Screen(node, URL, answers=answers(node))).split())
    oom = answers(node)[out_of_memory(node)[0]].oom

    assert "It died of an OutOfMemoryError" in text
    assert oom is not None
    assert f"Verdict: {oom.summary}." in text
    assert oom.advice[0].text in text
    assert all(line in text for line in oom.advice[0].lines)


def test_a_large_terminal_shows_the_whole_run(node: NodeState) -> None:
    """Where there is room for it, the selected rank's memory over its run is below its parts."""
    screen = Screen(node, URL, answers=answers(node))

    assert "The whole run (188 steps)" in draw(screen, 160, 50)
    assert "The whole run" not in draw(screen, 80, 24)


def test_the_last_picture_leaves_room(node: NodeState) -> None:
    """A picture of 18 lines has no keys and no empty lines, and still the verdict."""
    screen = Screen(node, URL, answers=answers(node))
    lines = picture(screen, console(), 18).plain.split("\n")

    assert len(lines) <= 18 + 1
    assert "q quit" not in lines[-2]
    assert any(line.startswith("Verdict: ") for line in lines)


@pytest.mark.parametrize("key", ["?", "h", "f1"])
def test_help(node: NodeState, key: str) -> None:
    """The help explains every key, every column and every part; Escape goes back to the list."""
    view = press(View(), key, []) or View()
    text = " ".join(draw(Screen(node, URL, view), 100, 120).split())

    for column in (*COLUMNS, *GPU_VALUES):
        assert f"{column.name} {column.meaning}" in text
    for entry in KEYS:
        assert f"{' '.join(entry.names)} {entry.does}" in text
    assert f"stranded {MEANING}" in text
    assert press(view, "escape", []) == View()


def test_the_report_of_a_rank(node: NodeState) -> None:
    """Enter opens the report of the selected rank, keys scroll to its end, Escape goes back."""
    view: View | None = View()
    lines: list[str] = []
    for key in ["enter", *["page down"] * 9, "escape"]:
        assert view is not None
        screen = Screen(node, URL, view, answers=answers(node))
        lines += draw(screen).splitlines()
        view = press(view, key, view.groups(node), last_line(screen, console()))
    text = " ".join(" ".join(lines).split())

    assert view == View(selected=out_of_memory(node)[0])
    assert "run nightly-7b (train.py), rank 3 of 4: oom" in text
    assert "PyTorch asked the driver for" in text
    assert "The whole run (188 steps)" in text
    assert "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128" in text


def test_scrolling_ends_at_the_last_line(node: NodeState) -> None:
    """After End, one key up moves one line up."""
    screen = Screen(node, URL, View(is_help=True))
    last = last_line(screen, console())
    view = press(screen.view, "end", [], last) or View()

    assert view.scroll == last
    assert press(view, "up", [], last) == View(is_help=True, scroll=last - 1)


def test_a_terminal_with_ascii_only(node: NodeState) -> None:
    """On the Linux console, lists, help and reports consist of ASCII, and each line fits."""
    _, history = seen(json.loads(RECORDED), 9)
    for view in (View(), View(is_help=True), View(is_open=True), View(is_typing=True)):
        screen = Screen(node, URL, view, answers=answers(node), history=history, is_ascii=True)
        text = draw(screen, 160, 60)
        assert text.isascii()
        assert max(map(len, text.split("\n"))) <= 160


def test_orders(node: NodeState) -> None:
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


def test_the_selection_stays_with_its_rank(node: NodeState) -> None:
    """Another order moves the selected rank, and it stays selected."""
    view = View()
    for key in ("end", "s"):
        view = press(view, key, view.groups(node)) or view
    selected = next(line for line in draw(Screen(node, URL, view)).split("\n") if "▶" in line)

    assert selected.split()[1] == "3"


def test_the_filter(node: NodeState) -> None:
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
