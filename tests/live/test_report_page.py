"""The page in one file of `torchmem why --html`, opened from a disk in a real Chromium."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import Page
from support.maps import map_of, varied_segments
from support.reports import BY_NAME, NOW, STRANDED
from support.words import oom_html

from torchmem.allocator.sizes import GIB
from torchmem.explain.call_stack import CallStack, Frame, Origin
from torchmem.explain.oom_report import OomReport
from torchmem.sample.memory_map import MAP_SUFFIX, encode
from torchmem.sample.run_history import RunHistory

EVIL = "<img src=x onerror=document.title='owned'>\"'></script><script>document.title='owned'"
STEPS = range(10, 380, 10)
HISTORY = RunHistory(
    steps=tuple(STEPS),
    seconds=tuple(step / 2 for step in STEPS),
    allocated_bytes=tuple(20 * GIB + step * GIB // 10 for step in STEPS),
    peak_bytes=tuple(28 * GIB + step * GIB // 10 for step in STEPS),
    stranded_bytes=tuple(step * GIB // 30 for step in STEPS),
    outside_bytes=(2 * GIB,) * len(STEPS),
    kept_bytes=(None,) * len(STEPS),
)
WITH_HISTORY = replace(STRANDED, device=replace(STRANDED.device, run_history=HISTORY))
OF_EVIL = replace(
    WITH_HISTORY,
    process=replace(STRANDED.process, run=EVIL, script=EVIL, hostname=EVIL),
    device=replace(
        WITH_HISTORY.device,
        name=EVIL,
        components={EVIL: 62 * GIB},
        phase_peaks={EVIL: GIB},
    ),
    origin=Origin(CallStack((Frame(EVIL, 1, EVIL),)), thread=EVIL, phase=EVIL),
    allocator_settings={"backend": EVIL, "pytorch_cuda_alloc_conf": EVIL},
)


def show(page: Page, folder: Path, report: OomReport) -> None:
    """Write the page of a report, with a map beside it, and open it from the disk."""
    source = folder / "1-2-3-1.oom.json"
    memory_map = map_of(varied_segments(), timestamp=NOW)
    source.with_name(f"1-2-3{MAP_SUFFIX}").write_bytes(encode(memory_map))
    file = folder / "oom.html"
    file.write_bytes(oom_html(source, report))
    page.goto(file.as_uri())
    page.wait("!document.querySelector('#text').open")


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_kind_opens_from_a_disk(page: Page, tmp_path: Path, name: str) -> None:
    """The page draws what it has, without an error, and asks for no other file."""
    show(page, tmp_path, BY_NAME[name])
    asked = page.evaluate("performance.getEntriesByType('resource').length")

    assert asked == 0
    assert page.evaluate("document.querySelector('.advice li').textContent.length") > 10


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_everybody_can_use_it(page: Page, tmp_path: Path, colors: str, width: int) -> None:
    """axe-core finds no violation, nothing is wider than the window, and all parts are drawn."""
    page.media(colors, motion="reduce")
    page.resize(width)
    show(page, tmp_path, WITH_HISTORY)
    page.wait("document.querySelector('.file-chart canvas')")

    assert page.axe() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('.map-legend tbody tr').length") == 6
    assert page.evaluate("document.querySelectorAll('.gpu-bar .segment').length") == 4
    dark = "rgb(14, 19, 26)"
    shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (colors == "dark") == (shown == dark)


def test_the_chart_is_read_with_the_pointer(page: Page, tmp_path: Path) -> None:
    """Under the pointer the chart says the step and the bytes; the last one is the failed step."""
    show(page, tmp_path, WITH_HISTORY)
    page.wait("document.querySelector('.u-over')")
    page.hover(".u-over")
    page.wait("/^step \\d+/.test(document.querySelector('.file-readout').textContent)")
    text = page.evaluate("document.querySelector('.file-readout').textContent")

    assert "peak so far" in text
    assert "the GPU's memory 80.0 GiB" in text


def test_a_chart_that_was_hidden_is_drawn_again(page: Page, tmp_path: Path) -> None:
    """A browser that gives the chart no room for a moment, such as to print, does not lose it."""
    show(page, tmp_path, WITH_HISTORY)
    page.wait("document.querySelector('.file-chart canvas')")
    page.evaluate("document.querySelector('#drawn').hidden = true")
    page.wait("!document.querySelector('.file-chart canvas')")
    page.evaluate("document.querySelector('#drawn').hidden = false")
    page.wait("document.querySelector('.file-chart canvas')")


def test_text_of_others_stays_text(page: Page, tmp_path: Path) -> None:
    """Markup in names, paths, lines and settings does nothing, in the markup and in the JSON."""
    show(page, tmp_path, OF_EVIL)
    page.wait("document.querySelector('.map-legend tbody tr')")
    page.hover(".gpu-bar .segment")

    assert EVIL in page.evaluate("document.title")
    assert EVIL in page.evaluate("document.querySelector('.report-about').textContent")
    assert EVIL in page.evaluate("document.querySelector('.parts').textContent")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.scripts.length") == 2


def test_without_javascript_the_text_is_there(tmp_path: Path) -> None:
    """The text is open in the markup; it is the page's code that folds it."""
    content = oom_html(tmp_path / "report", STRANDED).decode()

    assert '<details id="text" class="card" open>' in content
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in content
