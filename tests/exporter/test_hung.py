"""NVML calls that never return: each costs one thread and the values of one GPU."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.exposition import Exposition, scrape
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity, GpuLabels
from torchmem.exporter.nvml import GpuLostError, NvmlCallError, NvmlDownError
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.exporter.worker import JobThreads

OpenExporter = Callable[..., Exporter]
SUCCESS = "torchmem_exporter_collector_success"
MEMORY, UP, INFO = "nvml_memory_used_bytes", "nvml_gpu_up", "nvml_gpu_info"
ALL = {str(gpu) for gpu in range(8)}
UUIDS = [f"GPU-{gpu}" for gpu in range(8)]
# On GPU 5: while a value is read, while the process list is read, while the GPU is identified.
UTILIZATION, PROCESSES, IDENTITY = (Utilization, "GPU-5"), (Processes, "GPU-5"), ("gpu", 5)
COUNT = ("count", None)

Call = tuple[object, object]


class Node:
    """Eight GPUs whose calls can hang or fail; `calls` counts calls, `waits` those that hang."""

    def __init__(self) -> None:
        fake_gpus = [
            FakeGpu(
                GpuIdentity(index, uuid),
                MemoryInfo(80, 2, 77, 1),
                Processes(),
                Utilization(0.9),
                Power(400),
            )
            for index, uuid in enumerate(UUIDS)
        ]
        self.nvml = FakeNvml(lambda: fake_gpus, on_call=self._on_call)
        self.workers = JobThreads[GpuLabels]()
        self.calls = Counter[object]()
        self.waits = 0
        self.errors: dict[Call, Exception] = {}
        self._gates: dict[Call, threading.Event] = {}
        self._before = set(threading.enumerate())

    def hang(self, call: Call) -> None:
        """From now on this call does not return."""
        self._gates[call] = threading.Event()

    def release(self) -> None:
        """Let all calls return, and wait for their threads to end."""
        gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.set()
        until(lambda: not self.threads())

    def threads(self) -> int:
        """Return how many threads wait within NVML."""
        threads = set(threading.enumerate()) - self._before
        return sum(thread.name == "torchmem-nvml" for thread in threads)

    def _on_call(self, call: object, gpu: object) -> None:
        self.calls[call] += 1
        gate = self._gates.get((call, gpu))
        if gate is not None:
            self.waits += 1
            assert gate.wait(60)
        if (call, gpu) in self.errors:
            raise self.errors[call, gpu]


@pytest.fixture
def node() -> Iterator[Node]:
    """A node on which calls can hang."""
    node = Node()
    yield node
    node.release()


@pytest.fixture
def exporter(open_exporter: OpenExporter, node: Node) -> Exporter:
    """An exporter that has read all GPUs."""
    exporter = open_exporter(node.nvml, deadline_seconds=30, workers=node.workers)
    assert set(scrape(exporter).by("gpu", MEMORY)) == ALL
    return exporter


def late_scrape(exporter: Exporter, node: Node) -> Exposition:
    """Return a scrape that reaches its deadline while a call hangs."""
    before = node.waits
    with ThreadPoolExecutor(1) as pool:
        exposition = pool.submit(scrape, exporter)
        until(lambda: node.waits > before)
        node.workers.current.release()
        return exposition.result(60)


def test_scrape_in_which_a_call_hangs_returns_what_was_read(exporter: Exporter, node: Node) -> None:
    """At the deadline it has what was read, the late GPU, and the collectors that are missing."""
    node.hang(UTILIZATION)
    exposition = late_scrape(exporter, node)

    assert ALL == set(exposition.by("gpu", MEMORY)) == set(exposition.by("gpu", INFO))
    assert exposition.value("nvml_up", reason="timeout") == 0.0
    assert {gpu: float(gpu != "5") for gpu in ALL} == exposition.by("gpu", UP)
    success = exposition.by("collector", SUCCESS)
    assert {"utilization": 0.0, "memory": 1.0, "samples": 1.0}.items() <= success.items()


@pytest.mark.parametrize("call", [UTILIZATION, IDENTITY, PROCESSES])
def test_following_scrapes_skip_only_that_gpu(exporter: Exporter, node: Node, call: Call) -> None:
    """Wherever the call hangs, the other GPUs are complete, and the GPU keeps its identity."""
    node.hang(call)
    late_scrape(exporter, node)
    identified = node.calls["gpu"]
    later = [scrape(exporter) for _ in range(5)]

    for exposition in later:
        assert set(exposition.by("gpu", MEMORY)) == ALL - {"5"}
        assert set(exposition.by("gpu", "nvml_power_watts")) == ALL - {"5"}
        assert set(exposition.by("gpu", INFO)) == ALL
        assert {gpu: float(gpu != "5") for gpu in ALL} == exposition.by("gpu", UP)
        assert exposition.value("nvml_up") == 1.0
        assert set(exposition.by("collector", SUCCESS).values()) == {1.0}
        assert exposition.matching("nvml_gpu_error_code") == {}
    assert node.calls["gpu"] - identified == 5 * 7
    until(lambda: node.threads() == 1)


def test_each_hung_gpu_costs_one_thread(exporter: Exporter, node: Node) -> None:
    """GPUs that hang one after another have a thread each, however many scrapes follow."""
    for gpu in (2, 5, 6):
        node.hang((Utilization, UUIDS[gpu]))
        late_scrape(exporter, node)
    exposition = [scrape(exporter) for _ in range(5)][-1]

    until(lambda: node.threads() == 3)
    assert set(exposition.by("gpu", MEMORY)) == ALL - {"2", "5", "6"}
    assert dict.fromkeys(["2", "5", "6"], 0.0).items() <= exposition.by("gpu", UP).items()


def test_gpu_that_never_responded_is_skipped_too(open_exporter: OpenExporter, node: Node) -> None:
    """If the first call on a GPU hangs, its index identifies it."""
    node.hang(IDENTITY)
    exporter = open_exporter(node.nvml, deadline_seconds=30, workers=node.workers)
    late_scrape(exporter, node)
    exposition = scrape(exporter)

    assert exposition.value(UP, gpu="5") == 0.0
    assert set(exposition.by("gpu", MEMORY)) == ALL - {"5"}


def test_driver_that_hangs_is_left_alone(exporter: Exporter, node: Node) -> None:
    """When the number of GPUs is not returned, nothing else is called, and scrapes do not wait."""
    node.hang(COUNT)
    late_scrape(exporter, node)
    calls = node.calls.copy()
    exposition = [scrape(exporter) for _ in range(5)][-1]

    assert calls == node.calls
    until(lambda: node.threads() == 1)
    assert exposition.value("nvml_up", reason="timeout") == 0.0
    success = exposition.by("collector", SUCCESS)
    assert {"memory": 0.0, "samples": 1.0}.items() <= success.items()


@pytest.mark.parametrize("call", [UTILIZATION, IDENTITY, COUNT])
def test_call_that_returns_ends_the_gap(exporter: Exporter, node: Node, call: Call) -> None:
    """Once the stuck call has returned, the next scrape is complete, and no thread is left."""
    node.hang(call)
    late_scrape(exporter, node)
    scrape(exporter)
    node.release()

    assert set(scrape(exporter).by("gpu", MEMORY)) == ALL
    assert dict.fromkeys(ALL, 1.0) == scrape(exporter).by("gpu", UP)


@pytest.mark.parametrize(
    "error", [NvmlDownError("uninitialized"), GpuLostError(15), NvmlCallError("nvmlAny", 999)]
)
def test_late_failure_is_ignored(exporter: Exporter, node: Node, error: Exception) -> None:
    """The error of a call that returns too late does not take NVML down."""
    node.hang(UTILIZATION)
    node.errors[UTILIZATION] = error
    late_scrape(exporter, node)
    scrape(exporter)
    node.release()
    node.errors.clear()

    assert scrape(exporter).value("nvml_up") == 1.0
    assert node.calls["open"] == 1


def test_hang_and_return_are_logged_once(
    exporter: Exporter, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has GPU and collector, one reports the return, none for each scrape in between."""
    caplog.set_level(logging.INFO)
    node.hang(UTILIZATION)
    late_scrape(exporter, node)
    for _ in range(3):
        scrape(exporter)
    node.release()
    for _ in range(2):
        scrape(exporter)

    begin, end = (message for message in caplog.messages if "GPU 5" in message)
    assert begin.startswith(
        "GPU 5 (GPU-5) did not respond to the collector utilization within the deadline"
    )
    assert end == "GPU 5 (GPU-5) responds again"


def test_hung_driver_is_logged_once(
    exporter: Exporter, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """When no GPU is to blame the line names NVML."""
    node.hang(COUNT)
    late_scrape(exporter, node)
    scrape(exporter)

    assert (
        sum(
            message.startswith("NVML did not respond within the deadline")
            for message in caplog.messages
        )
        == 1
    )


def test_closing_does_not_wait_for_a_hung_gpu(exporter: Exporter, node: Node) -> None:
    """NVML is not shut down while a call is running."""
    node.hang(UTILIZATION)
    late_scrape(exporter, node)
    scrape(exporter)
    exporter.close()

    assert node.calls["close"] == 0
    until(lambda: node.threads() == 1)


def test_nvml_that_fails_is_not_shut_down_during_a_hung_call(
    exporter: Exporter, node: Node
) -> None:
    """While a call on one GPU hangs, a failure of NVML as a whole does not shut NVML down."""
    node.hang(UTILIZATION)
    late_scrape(exporter, node)
    node.errors[COUNT] = NvmlDownError("uninitialized")
    exposition = scrape(exporter)

    assert exposition.value("nvml_up", reason="uninitialized") == 0.0
    assert node.calls["close"] == 0


def test_closing_blames_no_gpu_for_the_deadline(
    open_exporter: OpenExporter, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the exporter while it waits for NVML logs no GPU as late."""
    node.hang(UTILIZATION)
    exporter = open_exporter(node.nvml, deadline_seconds=300)
    with ThreadPoolExecutor(1) as pool:
        exposition = pool.submit(scrape, exporter)
        until(lambda: node.waits)
        exporter.close()
        exposition.result(60)

    assert [message for message in caplog.messages if "deadline" in message] == []
