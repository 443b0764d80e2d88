"""Measure the memory map: in the rank, in the exporter, and in the browser.

    PYTHONPATH=tests python -m benchmarks.memory_map
    PYTHONPATH=tests python -m benchmarks.memory_map --snapshot big.pickle    # see snapshot_reading

Rank and exporter: CPU time of one map. Browser: frames per second and the CPU time of the page's
main thread for each, in headless Chromium without a GPU, while the wheel zooms in and out on every
frame; the wheel events are part of it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from support.browser import Page, open_page
from support.maps import FREE, PENDING, USED, device_of
from support.publishing import own_sample, publish, replace_file
from support.snapshots import segment

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.demo.node import SimulatedNode, uuid
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.map_file import checked
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import ExporterServer, serve
from torchmem.sample.memory_map import MAP_SUFFIX, MemoryMap, encode
from torchmem.sample.run_directory import SAMPLE_SUFFIX

MIB = 1 << 20
BLOCKS = (1_000, 10_000, 100_000, 300_000)
SECONDS = 4
ZOOM = """
new Promise((done) => {
  const canvas = document.querySelector("canvas.map-canvas");
  const box = canvas.getBoundingClientRect();
  const started = performance.now();
  let frames = 0;
  const step = () => {
    frames += 1;
    canvas.dispatchEvent(new WheelEvent("wheel", {
      deltaY: frames %% 120 < 60 ? -40 : 40, cancelable: true,
      clientX: box.x + box.width / 3, clientY: box.y + box.height / 2 }));
    const seconds = (performance.now() - started) / 1000;
    if (seconds < %d) requestAnimationFrame(step);
    else done({ frames, seconds });
  };
  requestAnimationFrame(step);
})
"""


def snapshot(blocks: int) -> list[SegmentInfo]:
    """Return segments of the small and the large pool with this many blocks."""
    rng, left = random.Random(1), blocks  # noqa: S311 - test data
    found = list[SegmentInfo]()
    while left:
        is_small = rng.random() < 0.4
        count = min(left, rng.randint(1, 400 if is_small else 60))
        states = rng.choices((USED, FREE, PENDING), (60, 37, 3), k=count)
        scale = 512 if is_small else MIB
        sizes = [rng.randint(1, 400 if is_small else 60) * scale for _ in range(count)]
        kind = "small" if is_small else "large"
        address = (1 << 40) + (len(found) << 32)
        found.append(segment(address, kind, list(zip(sizes, states, strict=True))))
        left -= count
    return found


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the least CPU time of three calls."""
    times = []
    for _ in range(3):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times)


@contextmanager
def node(run_dir: Path) -> Iterator[ExporterServer]:
    """Serve a simulated node."""
    simulated = SimulatedNode(1)
    exporter = Exporter(FakeNvml(lambda: simulated.gpus(60.0, [{}])), RunDirectory(run_dir))
    with closing(exporter), closing(serve(exporter)) as server:
        yield server


def frames(page: Page, server: ExporterServer, run_dir: Path, content: bytes) -> str:
    """Return the cells of a row: frames per second, CPU time of a frame."""
    sample = publish(run_dir, own_sample(uuid(0), memory_map=True))
    name = sample.name.removesuffix(SAMPLE_SUFFIX) + MAP_SUFFIX
    replace_file(sample.with_name(name), content)
    page.goto("about:blank")
    page.goto(server.url)
    page.wait("document.querySelector('.rank .row')")
    page.click(".rank .row")
    page.click("role=tab[name='Memory map']")
    page.wait("document.querySelector('.map-legend tbody tr')")
    before = page.cpu_seconds()
    found = page.evaluate(ZOOM % SECONDS)
    spent = page.cpu_seconds() - before
    rate, milliseconds = found["frames"] / found["seconds"], spent / found["frames"] * 1000
    return f"{rate:.0f} | {milliseconds:.1f} ms"


def measure_maps(page: Page, run_dir: Path) -> None:
    """Print one row for each number of blocks."""
    print("| blocks | snapshot measured | map made | encoded | file | decoded | frames/s | frame |")
    print("|---|---|---|---|---|---|---|---|")
    with node(run_dir) as server:
        for blocks in BLOCKS:
            found = snapshot(blocks)
            device = device_of(found, uuid(0))
            content = encode(MemoryMap(0.0, [device]))
            costs = [
                cpu_seconds(partial(measure, found, 0, 0.0)),
                cpu_seconds(partial(device_of, found)),
                cpu_seconds(partial(encode, MemoryMap(0.0, [device]))),
            ]
            decoded = cpu_seconds(partial(checked, content, 1.0))
            cells = [f"{cost * 1000:.1f} ms" for cost in costs]
            cells += [f"{len(content) / 1e3:.0f} KB", f"{decoded * 1000:.1f} ms"]
            print(
                f"| {blocks:,} | {' | '.join(cells)} | {frames(page, server, run_dir, content)} |"
            )


def measure_file(page: Page, run_dir: Path, path: Path) -> None:
    """Print how long the browser takes to show a snapshot."""
    with node(run_dir) as server:
        page.goto(server.url)
        started = time.monotonic()
        page.choose("input[type=file]", path)
        page.wait("document.querySelector('.file-section .map-legend tbody tr')")
        seconds = time.monotonic() - started
    print(f"{path.stat().st_size / 1e6:.0f} MB: shown after {seconds:.1f} s")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot", type=Path, help="a memory snapshot to open in the browser")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, open_page() as page:
        if arguments.snapshot:
            measure_file(page, Path(name), arguments.snapshot)
        else:
            measure_maps(page, Path(name))


if __name__ == "__main__":
    main()
