"""The end of an exporter, at any moment of what other threads do with it."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.exposition import Exposition, scrape
from support.nvml_binding import FakeBinding
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import Events, GpuIdentity
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.rundir import Published, RunDirectory
from torchmem.exporter.scrapes import Collector
from torchmem.exporter.serve import DEFAULT_LIMITS, ExporterServer, _listen, _Server
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.exporter.web.connections import Connections, Limits
from torchmem.exporter.web.live import LiveConfig

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


class EndedAtOnce(_Server):
    """A server that another thread ends as soon as it has an event loop."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_loop" and value is not None:
            self.end()


def test_server_that_is_ended_while_it_starts(open_exporter: OpenExporter) -> None:
    """Closing a server that only just begins is no error."""
    collector: Collector = open_exporter()
    listener = _listen("127.0.0.1", 0)
    server = EndedAtOnce(collector, listener, LiveConfig(), DEFAULT_LIMITS, lambda: None)
    running = ExporterServer(listener, server, "http")

    assert running.stopped.wait(60)
    assert server.started


async def stop_as_one_connects(complaints: list[Any], *, connects_first: bool) -> None:
    """Cancel accepting in the same turn of the event loop in which a connection comes."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        connections = Connections(Limits(), lambda: None, lambda _: asyncio.Protocol())
        accepting = asyncio.create_task(connections.serve(listener))
        await asyncio.sleep(0.01)
        stop, stopped = os.pipe()
        loop.add_reader(stop, lambda: accepting.cancel() and loop.remove_reader(stop))
        client.setblocking(False)
        if connects_first:
            client.connect_ex(listener.getsockname())
        os.write(stopped, b"x")
        client.connect_ex(listener.getsockname())  # a second time it does nothing
        await asyncio.wait({accepting})
        await asyncio.sleep(0.01)
        os.close(stop)
        os.close(stopped)


@pytest.mark.parametrize("connects_first", [True, False])
def test_connection_that_comes_as_the_server_ends(*, connects_first: bool) -> None:
    """It is not accepted and then forgotten, and brings no traceback."""
    complaints: list[Any] = []
    gc.collect()  # what others forgot is not meant
    with warnings.catch_warnings(record=True) as forgotten:
        warnings.simplefilter("always")
        asyncio.run(stop_as_one_connects(complaints, connects_first=connects_first))
        gc.collect()

    assert [] == complaints
    assert [] == [str(warning.message) for warning in forgotten]
