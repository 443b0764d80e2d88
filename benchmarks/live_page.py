"""Measure the CPU time of the live page: a state in the exporter, and an update in the browser.

Run `PYTHONPATH=tests python -m benchmarks.live_page`; it needs what the tests in Chromium need.
Ranks are spread over 16 GPUs, and each has published everything that a sample can hold. A state
costs this on top of a collection, which docs/measurements/overhead.md measures.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import cycle

from support.browser import Page, open_page
from support.collectors import EmptyCollector
from support.publishing import own_process, own_sample

from torchmem.demo.node import SimulatedNode, uuid
from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.live.state import node_state
from torchmem.exporter.live.states import EncodedState
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.server import serve
from torchmem.node.published import Published

GPUS = 16
RANKS = (8, 64, 1024)
REPETITIONS = 10
BROWSER_SECONDS = 20.0


class Node(EmptyCollector):
    """A collector whose ranks are all different at each call of `found`, as in training."""

    def __init__(self, ranks: int) -> None:
        nvml = FakeNvml.of(*SimulatedNode(GPUS).gpus(60.0))
        exporter = Exporter(nvml, RunDirectory(self.run_dir))
        exporter.collect()
        exporter.close()
        turns = [[published(rank, turn) for rank in range(ranks)] for turn in range(3)]
        self._turns = cycle(replace(exporter.found(), published=turn) for turn in turns)

    def found(self) -> NodeReading:
        """Return the ranks, found now."""
        return replace(next(self._turns), time=time.time())


def published(rank: int, turn: int) -> Published:
    """Return a rank, whose cache has another size at each turn."""
    sample = own_sample(uuid(rank % GPUS), own_process(rank=rank))
    device = sample.devices[0]
    assert device.layout is not None
    layout = replace(device.layout, stranded_bytes=(8 + turn) << 30)
    sample = replace(sample, devices=(replace(device, layout=layout),))
    return Published(sample, 7000 + rank, "running", attributed=True, path=str(rank))


def main() -> None:
    """Print one row for each number of ranks."""
    print("| ranks | state, CPU ms | compression, CPU ms | KB, compressed | browser, CPU ms |")
    print("|---|---|---|---|---|")
    with open_page() as page:
        for ranks in RANKS:
            node = Node(ranks)
            made, packed, size = encoding(node)
            shown = in_browser(page, node)
            print(f"| {ranks:,} | {made:.1f} | {packed:.1f} | {size / 1e3:.0f} | {shown:.0f} |")


def encoding(node: Node) -> tuple[float, float, int]:
    """Return CPU milliseconds for a state and for its compression, and its compressed bytes."""
    started = time.process_time()
    found = node.found()
    states = [EncodedState(found, node_state(found)) for _ in range(REPETITIONS)]
    encoded = time.process_time()
    size = max(len(state.gzipped) for state in states)
    packed = time.process_time()
    each = 1000 / REPETITIONS
    return (encoded - started) * each, (packed - encoded) * each, size


def in_browser(page: Page, node: Node) -> float:
    """Return the CPU milliseconds of the page's main thread for one update."""
    with closing(serve(node)) as server:
        page.goto(server.url)
        page.wait("document.querySelectorAll('.rank').length > 0")
        page.evaluate(
            "(() => { const ask = fetch; window.updates = 0; window.fetch = (path, ...more) => {"
            " updates += path === 'api/v1/state'; return ask(path, ...more); }; })()"
        )
        page.wait("updates > 1")
        page.cpu_seconds()
        before, counted = page.cpu_seconds(), page.evaluate("updates")
        time.sleep(BROWSER_SECONDS)
        busy = page.cpu_seconds() - before
        updates: int = page.evaluate("updates") - counted
    return 1000 * busy / updates


if __name__ == "__main__":
    main()
