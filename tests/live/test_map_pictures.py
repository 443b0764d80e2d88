"""The pictures of the memory map in docs/screens.md.

WRITE_PICTURES=1 pytest tests/live/test_map_pictures.py
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.browser import Page
from support.recordings import varying_lengths
from support.waiting import until

from torchmem import sdk
from torchmem.demo.node import SimulatedNode, uuid
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MIN_STATES = 3
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ExporterServer]:
    node = SimulatedNode(1)
    exporter = Exporter(FakeNvml(lambda: node.gpus(60.0, [{}])), RunDirectory(tmp_path / "run"))
    with closing(exporter), closing(serve(exporter)) as running:
        yield running


def colors_drawn(page: Page) -> int:
    """Return how many colors take more than a hundredth of the map."""
    return int(
        page.evaluate(
            "(() => { const c = document.querySelector('canvas.map-canvas');"
            "const d = new Uint32Array(c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data.buffer);"
            "const n = new Map(); for (const v of d) n.set(v, (n.get(v) ?? 0) + 1);"
            "return [...n.values()].filter((v) => v > d.length / 100).length; })()"
        )
    )


def picture(page: Page, tmp_path: Path, name: str) -> None:
    """Take a picture, for the documentation if asked, once every state is drawn."""
    page.wait("document.querySelector('.map-legend tbody tr')")
    page.wait("document.fonts.status === 'loaded'")
    until(lambda: colors_drawn(page) >= MIN_STATES)
    folder = PICTURES if os.environ.get("WRITE_PICTURES") else tmp_path
    page.screenshot(folder / name)
    assert (folder / name).stat().st_size > 20_000


def fragmented() -> DeviceCachingAllocator:
    """An allocator whose steps had many sizes, while some tensors stayed."""
    gpu = SimulatedGpu(80 * GIB, context_bytes=GIB // 2, uuid=uuid(0), name="H100")
    allocator, rng = DeviceCachingAllocator(gpu), random.Random(4)
    kept = [allocator.malloc(rng.choice((128, 256, 512)) * MIB) for _ in range(60)]
    for _ in range(40):
        step = [allocator.malloc(rng.randint(1, 700) * MIB // 2) for _ in range(30)]
        small = [allocator.malloc(rng.randint(1, 400) * 512) for _ in range(60)]
        stays = rng.sample(step, 1) + rng.sample(small, 4)
        kept += stays
        for block in [*step, *small]:
            if block not in stays:
                allocator.free(block)
    return allocator


def test_a_fragmented_rank(page: Page, server: ExporterServer, tmp_path: Path) -> None:
    """The map of a rank whose steps had many sizes, from the real SDK."""
    backend = SimulatedBackend([fragmented()])
    page.resize(1280, 1120)
    # A simulated snapshot takes so long that by the usual budget the next one is a minute later.
    with sdk.instrument(
        backend=backend,
        run="llm-7b",
        run_dir=tmp_path / "run",
        interval=0.1,
        snapshot_interval=0.5,
        snapshot_budget=1.0,
        idle_after=0.2,
    ) as session:
        session.step()
        page.goto(server.url)
        page.wait("document.querySelector('.rank .row')")
        page.click(".rank .row")
        page.click("role=tab[name='Memory map']")
        page.wait("document.querySelector('.map-legend tbody tr')")
        page.evaluate("document.querySelector('canvas.map-canvas').focus()")
        for _ in range(9):
            page.press("s")
        picture(page, tmp_path, "live-page-map.png")


def test_a_recording(page: Page, server: ExporterServer, tmp_path: Path) -> None:
    """A snapshot with its trace."""
    path = tmp_path / "rank0.pickle"
    path.write_bytes(pickle.dumps(varying_lengths(steps=60).snapshot()))
    page.resize(1280, 1120)
    page.goto(server.url)
    page.wait("document.getElementById('connection').dataset.connected === 'true'")
    page.choose("input[type=file]", path)
    page.wait("document.querySelectorAll('.file-chart canvas').length === 2")
    picture(page, tmp_path, "live-page-file.png")
