"""The end of an exporter, at any moment of what other threads do with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.exposition import Exposition, scrape
from support.nvml_binding import FakeBinding
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import Events, GpuIdentity
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.run_directory import Published, RunDirectory
from torchmem.exporter.testing import FakeGpu, FakeNvml

OpenExporter = Callable[..., Exporter]


class SlowToSubscribe(FakeNvml):
    """An NVML that takes as long for a subscription as the test wants."""

    asked: threading.Event
    answer: threading.Event

    def subscribe(self, uuids: Sequence[str]) -> Events | None:
        """Wait, then subscribe."""
        self.asked.set()
        assert self.answer.wait(60)
        return super().subscribe(uuids)


def test_subscription_that_comes_too_late_is_let_go(open_exporter: OpenExporter) -> None:
    """When NVML gives a subscription while the exporter is being closed, no thread is left that waits for events."""
    nvml = SlowToSubscribe.of(FakeGpu(GpuIdentity(0, "GPU-a"), event_kinds=frozenset({"xid"})))
    assert isinstance(nvml, SlowToSubscribe)
    nvml.asked, nvml.answer = threading.Event(), threading.Event()
    exporter = open_exporter(nvml, deadline_seconds=300)
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(exporter.collect)
        assert nvml.asked.wait(60)
        exporter.close()
        nvml.answer.set()
        shown.result(60)

    until(lambda: [True] == [events.is_closed for events in nvml.subscriptions])


def test_scrape_after_the_end_asks_nothing(open_exporter: OpenExporter) -> None:
    """A scrape that the server still answers while the exporter ends brings NVML up no more, and waits for nothing."""
    binding = FakeBinding(2)
    exporter = open_exporter(PyNvml(binding), deadline_seconds=300)
    scrape(exporter)
    exporter.close()
    gate = binding.block("nvmlDeviceGetCount")
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(scrape, exporter).result(30).matching("torchmem_exporter_build_info")
    finally:
        gate.set()

    assert (1, 1) == (binding.calls["nvmlInit"], binding.calls["nvmlShutdown"])


class SlowDirectory(RunDirectory):
    """A run directory that takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(Path("none"))
        self.asked, self.answer = threading.Event(), threading.Event()

    def read(self, now: float) -> list[Published]:
        """Wait, then read."""
        self.asked.set()
        assert self.answer.wait(60)
        return super().read(now)


def test_what_is_known_while_the_run_directory_is_read(open_exporter: OpenExporter) -> None:
    """An impatient scrape that comes when the driver has answered, but not the run directory, has the GPUs' values."""
    directory = SlowDirectory()
    exporter = open_exporter(PyNvml(FakeBinding(2)), directory)
    with ThreadPoolExecutor(2) as pool:
        collected = pool.submit(exporter.collect)
        assert directory.asked.wait(60)
        known = pool.submit(exporter.known)
        directory.answer.set()
        shown = Exposition(known.result(60))
        collected.result(60)

    assert 1.0 == shown.value("nvml_up")
    assert {"0", "1"} == set(shown.by("gpu", "nvml_memory_used_bytes"))
