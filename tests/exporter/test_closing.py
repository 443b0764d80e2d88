"""Closing an exporter while other threads use it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.exposition import Exposition, scrape
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.node.published import Published

OpenExporter = Callable[..., Exporter]


class Gate:
    """A call that a test holds up: `reached` when it begins, `opened` to let it continue."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Hold up the caller."""
        self.reached.set()
        assert self.opened.wait(60)


def test_late_subscription_is_closed(open_exporter: OpenExporter) -> None:
    """If NVML returns a subscription while the exporter is closed, no thread waits for events."""
    gate = Gate()
    gpu = FakeGpu(GpuIdentity(0, "GPU-a"), event_kinds=["xid"])

    def hold_up(call: object, _gpu: object) -> None:
        if call == "subscribe":
            gate.wait()

    nvml = FakeNvml(lambda: [gpu], on_call=hold_up)
    exporter = open_exporter(nvml, deadline_seconds=300)
    with ThreadPoolExecutor(1) as pool:
        scraped = pool.submit(exporter.collect)
        assert gate.reached.wait(60)
        exporter.close()
        gate.opened.set()
        scraped.result(60)

    until(lambda: [events.is_closed for events in nvml.subscriptions] == [True])


def test_scrape_after_the_end_calls_nothing(open_exporter: OpenExporter) -> None:
    """A scrape that the server answers after the end neither opens NVML nor waits for it."""
    calls = Counter[object]()
    nvml = FakeNvml(list, on_call=lambda call, _: calls.update([call]))
    exporter = open_exporter(nvml)
    scrape(exporter)
    exporter.close()
    before = calls.copy()

    assert scrape(exporter).matching("torchmem_exporter_build_info")
    assert before == calls
    assert (calls["open"], calls["close"]) == (1, 1)


def test_no_thread_is_left(open_exporter: OpenExporter) -> None:
    """A closed exporter leaves no thread, so a program can open and close any number of them."""
    gpu = FakeGpu(GpuIdentity(0, "GPU-a"), Processes([ProcessMemory(os.getpid(), 1 << 30)]))
    before = set(threading.enumerate())
    exporter = open_exporter(FakeNvml(lambda: [gpu]))
    named = scrape(exporter).matching("nvml_process_info")
    during = set(threading.enumerate()) - before
    exporter.close()

    assert named
    assert during
    until(lambda: set(threading.enumerate()) <= before)


class SlowDirectory(RunDirectory):
    """A run directory whose first reading takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(Path("none"))
        self.gate = Gate()

    def read(self, now: float) -> list[Published]:
        """Wait, then read."""
        self.gate.wait()
        return super().read(now)


def test_gpus_are_known_while_the_run_directory_is_read(open_exporter: OpenExporter) -> None:
    """An impatient scrape has the GPUs' values even if the run directory has not been read yet."""
    directory = SlowDirectory()
    gpu = FakeGpu(GpuIdentity(0, "GPU-a"), MemoryInfo(80, 2, 77, 1))
    exporter = open_exporter(FakeNvml.of(gpu), directory)
    with ThreadPoolExecutor(2) as pool:
        collected = pool.submit(exporter.collect)
        assert directory.gate.reached.wait(60)
        known = pool.submit(exporter.known)
        directory.gate.opened.set()
        exposition = Exposition(known.result(60))
        collected.result(60)

    assert exposition.value("nvml_up") == 1.0
    assert set(exposition.by("gpu", "nvml_memory_used_bytes")) == {"0"}
