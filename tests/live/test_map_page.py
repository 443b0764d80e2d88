"""The memory map in a real Chromium: what it adds up to, and how it is used."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.browser import Page
from support.maps import device_of, full_map, map_of, varied_segments
from support.publishing import own_sample, publish, replace_file
from support.snapshots import segments
from support.waiting import until

from torchmem.allocator.sizes import format_index
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo
from torchmem.demo.node import SimulatedNode, uuid
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.page import files
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.sample.memory_map import MAP_SUFFIX, DeviceMap, MemoryMap, encode
from torchmem.sample.run_directory import SAMPLE_SUFFIX

GIB = 1 << 30
CANVAS = "canvas.map-canvas"
RANK = ".rank .row"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


@pytest.fixture
def server(run_dir: Path) -> Iterator[ExporterServer]:
    node = SimulatedNode(1)
    exporter = Exporter(FakeNvml(lambda: node.gpus(60.0, [{}])), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter)) as running:
        yield running


def module(name: str) -> str:
    """Return an expression for a module of the page."""
    return f"import('/static/{files().digest}/{name}')"


def as_json(device: DeviceMap) -> Any:
    """Return a device as the browser gets it."""
    return json.loads(gzip.decompress(encode(MemoryMap(0.0, [device]))))["devices"][0]


def expected(found: list[SegmentInfo], device: DeviceMap) -> dict[str, Any]:
    """Return the sums by Python's definitions."""
    own = [segment for segment in found if segment["segment_pool_id"] == DEFAULT_POOL]
    blocks = [block for segment in own for block in segment["blocks"]]
    layout = device.layout
    return {
        "bytes": {
            "allocated": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
            "pending": layout.pending_free_bytes,
            "private_used": layout.private_used_bytes,
            "private_free": layout.private_free_bytes,
            "releasable": layout.releasable_bytes,
            "stranded": layout.stranded_bytes,
        },
        "total": sum(segment["total_size"] for segment in found),
        "fragmentation": layout.fragmentation_ratio,
    }


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(segments(), min_size=12, max_size=12), st.integers(1, 60))
def test_the_browser_and_the_sample_agree(
    page: Page, server: ExporterServer, drawn: list[list[SegmentInfo]], bound: int
) -> None:
    """Each state has the same bytes as in the sample, also where small blocks were merged."""
    devices = [device_of(found) for found in drawn]
    bounded = [device_of(found, max_blocks=bound) for found in drawn]
    kept = [device for device in bounded if not device.omitted_bytes]
    if not page.evaluate("location.href").startswith(server.url):
        page.goto(server.url)
    given_devices = json.dumps([as_json(device) for device in [*devices, *kept]])
    shown = page.evaluate(
        f"{module('memory_layout.js')}.then(({{ layoutOf }}) => {given_devices}.map(layoutOf)"
        ".map(({ bytes, total, fragmentation }) => ({ bytes, total, fragmentation })))"
    )
    wanted = [expected(f, d) for f, d in zip(drawn, devices, strict=True)]
    wanted += [expected(f, d) for f, d in zip(drawn, bounded, strict=True) if not d.omitted_bytes]
    for browser, sample in zip(shown, wanted, strict=True):
        assert browser == {**sample, "fragmentation": pytest.approx(sample["fragmentation"])}


def publish_map(run_dir: Path, memory_map: MemoryMap, **changes: Any) -> None:
    """Publish a rank with its map."""
    sample = publish(run_dir, own_sample(uuid(0), memory_map=True, **changes))
    name = sample.name.removesuffix(SAMPLE_SUFFIX) + MAP_SUFFIX
    replace_file(sample.with_name(name), encode(memory_map))


def open_map(page: Page, server: ExporterServer) -> None:
    """Open the tab of the only rank."""
    page.goto(server.url)
    page.wait(f"document.querySelector('{RANK}')")
    page.click(RANK)
    page.click("role=tab[name='Memory map']")


def text(page: Page, selector: str) -> str:
    """Return the text of an element."""
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


def test_the_map_says_what_it_shows(page: Page, server: ExporterServer, run_dir: Path) -> None:
    """Summary, legend and the name for screen readers have the numbers of the sample."""
    memory_map = map_of(varied_segments(), uuid(0))
    publish_map(run_dir, memory_map)
    open_map(page, server)
    page.wait("document.querySelector('.map-legend tbody tr')")

    summary = text(page, ".map-summary")
    layout = memory_map.devices[0].layout
    assert f"fragmentation index is {format_index(layout.fragmentation_ratio or 0)}." in summary
    assert "40.0 MiB in private pools" in summary
    assert summary in page.evaluate(f"document.querySelector('{CANVAS}').ariaLabel")
    rows = text(page, ".map-legend tbody").split("\n")
    for name, size in (
        ("Stranded", layout.stranded_bytes),
        ("Releasable", layout.releasable_bytes),
    ):
        assert any(name in row and f"{size / (1 << 20):.1f} MiB" in row for row in rows), rows


def test_keyboard_pointer_and_wheel(page: Page, server: ExporterServer, run_dir: Path) -> None:
    """Blocks are selected with keys and clicks; wheel, drag and buttons change what is in view."""
    publish_map(run_dir, map_of(varied_segments(), uuid(0)))
    open_map(page, server)
    page.wait("document.querySelector('.map-legend tbody tr')")
    page.evaluate(f"document.querySelector('{CANVAS}').focus()")
    page.press("s")
    assert text(page, ".map-details").startswith("Stranded: 6.0 MiB")
    assert "6.0 MiB" in page.evaluate("document.querySelector('.map [aria-live]').textContent")
    page.press("ArrowRight")
    assert text(page, ".map-details").startswith("Pending: 2.0 MiB")
    page.press("Shift+S")
    assert text(page, ".map-details").startswith("Stranded: 6.0 MiB")
    page.press("End")
    assert "private pool 0,3" in text(page, ".map-details")

    before = pixels(page)
    page.wheel(CANVAS, 300, 100, -600)
    until(lambda: pixels(page) != before)
    zoomed = pixels(page)
    page.drag(CANVAS, (300, 100), (500, 100))
    until(lambda: pixels(page) != zoomed)
    page.press("0")
    page.hover("h1")  # away from the block under the pointer, which has an outline
    until(lambda: pixels(page) == before)


def pixels(page: Page) -> int:
    """Return a number that changes with the picture.

    What has changed is drawn in the next frame; what has another size by that, in the one after.
    """
    return int(
        page.evaluate(
            "(async () => {"
            "const frame = () => new Promise((ended) =>"
            " requestAnimationFrame(() => setTimeout(ended)));"
            f"await frame(); await frame(); const c = document.querySelector('{CANVAS}');"
            "const d = new Uint32Array(c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data.buffer);"
            "let h = 0; for (const v of d) h = (h * 31 + v) | 0; return h; })()"
        )
    )


def test_it_plays_back_what_it_has_seen(page: Page, server: ExporterServer, run_dir: Path) -> None:
    """Each new map is kept; the slider goes back, and a block has an age."""
    found, first = varied_segments(), time.time() - 30
    publish_map(run_dir, map_of(found, uuid(0), first))
    open_map(page, server)
    page.wait("document.querySelector('.map-legend tbody tr')")
    assert page.evaluate("document.querySelector('.map-time').hidden") is True
    publish_map(run_dir, map_of(found[:2], uuid(0), first + 30))
    page.wait("document.querySelector('.map-summary')?.innerText.includes('2 segments')")
    page.evaluate(f"document.querySelector('{CANVAS}').focus()")
    page.press("Home")
    assert "Age\nat least 30 s" in text(page, ".map-details")

    page.evaluate(
        "(() => { const s = document.querySelector('.map-time input'); s.value = 0;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    page.wait("document.querySelector('.map-summary')?.innerText.includes('5 segments')")
    page.click("role=button[name='Show the newest map']")
    page.wait("document.querySelector('.map-summary')?.innerText.includes('2 segments')")


def test_a_rank_without_a_map_says_why(page: Page, server: ExporterServer, run_dir: Path) -> None:
    """Waiting, turned off, and a file that is refused: one sentence each."""
    publish(run_dir, own_sample(uuid(0), memory_map=False))
    open_map(page, server)
    page.wait("document.querySelector('.map-message')?.innerText.includes('turned the map off')")
    publish(run_dir, own_sample(uuid(0), memory_map=True))
    page.wait("document.querySelector('.map-message')?.innerText.includes('next snapshot')")
    publish_map(run_dir, full_map())
    page.wait("document.querySelector('.map-legend tbody tr')")
    assert all("409" in problem for problem in page.problems())


@pytest.mark.parametrize(("colors", "width"), [("light", 1440), ("dark", 390)])
def test_the_map_is_accessible(
    page: Page, server: ExporterServer, run_dir: Path, colors: str, width: int
) -> None:
    """axe-core finds nothing, and nothing is wider than the window."""
    page.media(colors)
    page.resize(width)
    publish_map(run_dir, map_of(varied_segments(), uuid(0)))
    open_map(page, server)
    page.wait("document.querySelector('.map-legend tbody tr')")
    page.evaluate(f"document.querySelector('{CANVAS}').focus()")
    page.press("s")
    assert page.axe() == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_rank_that_died_shows_its_last_map(
    page: Page, server: ExporterServer, run_dir: Path
) -> None:
    """Until its time to live ends."""
    publish_map(run_dir, map_of(varied_segments(), uuid(0)), ended="oom")
    open_map(page, server)
    page.wait("document.querySelector('.map-summary')?.innerText.includes('5 segments')")
