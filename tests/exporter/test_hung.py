"""NVML calls that never return: each costs one thread and the values of one GPU, until it returns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.exposition import Exposition, scrape
from support.nvml_binding import FakeBinding, uuid_of
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.nvml import PyNvml

OpenExporter = Callable[..., Exporter]
SUCCESS = "torchmem_exporter_collector_success"
UTILIZATION = "nvmlDeviceGetUtilizationRates"
MEMORY, UP, INFO = "nvml_memory_used_bytes", "nvml_gpu_up", "nvml_gpu_info"
ALL = {str(gpu) for gpu in range(8)}


class Node:
    """Eight GPUs; the threads that read them; what is blocked is let go at the end."""

    def __init__(self) -> None:
        self.binding = FakeBinding(8)
        self._before = set(threading.enumerate())
        self._gates: list[threading.Event] = []

    def hang(self, name: str, gpu: int | None = None) -> None:
        """From now on this call does not return."""
        self._gates.append(self.binding.block(name, gpu))

    def release(self) -> None:
        """All calls return, and the threads end."""
        for gate in self._gates:
            gate.set()
        until(lambda: not self.threads())

    def threads(self) -> int:
        """How many threads wait within NVML."""
        return sum(
            thread.name == "torchmem-nvml" for thread in set(threading.enumerate()) - self._before
        )


@pytest.fixture
def node() -> Iterator[Node]:
    """A node that hangs when it is told."""
    node = Node()
    yield node
    node.release()


@pytest.fixture
def exporter(open_exporter: OpenExporter, node: Node) -> Exporter:
    """An exporter that has seen the node whole."""
    exporter = open_exporter(PyNvml(node.binding), deadline_seconds=30)
    assert ALL == set(scrape(exporter).by("gpu", MEMORY))
    return exporter


def late_scrape(exporter: Exporter, node: Node) -> Exposition:
    """A scrape of which the deadline comes when a call hangs."""
    before = node.binding.waits
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(scrape, exporter)
        until(lambda: node.binding.waits > before)
        exporter._workers.current.release()
        return shown.result(60)


def test_scrape_in_which_it_begins_is_answered_from_what_is_known(
    exporter: Exporter, node: Node
) -> None:
    """At the deadline there is what was read so far, the GPU that is waited for, and who was not done."""
    node.hang(UTILIZATION, gpu=5)
    shown = late_scrape(exporter, node)

    assert ALL == set(shown.by("gpu", MEMORY)) == set(shown.by("gpu", INFO))
    assert 0.0 == shown.value("nvml_up", reason="timeout")
    assert {gpu: float(gpu != "5") for gpu in ALL} == shown.by("gpu", UP)
    assert {"utilization": 0.0, "memory": 1.0, "samples": 1.0}.items() <= shown.by(
        "collector", SUCCESS
    ).items()


@pytest.mark.parametrize(
    "call", [UTILIZATION, "nvmlDeviceGetUUID", "nvmlDeviceGetComputeRunningProcesses_v3"]
)
def test_following_scrapes_leave_out_that_gpu_alone(
    exporter: Exporter, node: Node, call: str
) -> None:
    """Wherever the call hangs, in the roll call too: the others are complete, its identity stays, it is not asked."""
    node.hang(call, gpu=5)
    late_scrape(exporter, node)
    asked = node.binding.calls["nvmlDeviceGetUUID"]
    later = [scrape(exporter) for _ in range(5)]

    for shown in later:
        assert (
            ALL - {"5"} == set(shown.by("gpu", MEMORY)) == set(shown.by("gpu", "nvml_power_watts"))
        )
        assert ALL == set(shown.by("gpu", INFO))
        assert {gpu: float(gpu != "5") for gpu in ALL} == shown.by("gpu", UP)
        assert 1.0 == shown.value("nvml_up")
        assert {1.0} == set(shown.by("collector", SUCCESS).values())
        assert {} == shown.matching("nvml_gpu_error_code")
    assert 5 * 7 == node.binding.calls["nvmlDeviceGetUUID"] - asked
    until(lambda: 1 == node.threads())


def test_each_hung_gpu_costs_one_thread(exporter: Exporter, node: Node) -> None:
    """GPUs that hang one after another have a thread each, however often one scrapes."""
    for gpu in (2, 5, 6):
        node.hang(UTILIZATION, gpu)
        late_scrape(exporter, node)
    shown = [scrape(exporter) for _ in range(5)][-1]

    until(lambda: 3 == node.threads())
    assert ALL - {"2", "5", "6"} == set(shown.by("gpu", MEMORY))


def test_gpu_that_hangs_when_nothing_is_known_yet(open_exporter: OpenExporter, node: Node) -> None:
    """Without a UUID the NVML index names it; the others are there from the second scrape on."""
    node.hang("nvmlDeviceGetUUID", gpu=5)
    exporter = open_exporter(PyNvml(node.binding), deadline_seconds=30)
    late_scrape(exporter, node)
    shown = scrape(exporter)

    assert 0.0 == shown.value(UP, gpu="5")
    assert ALL - {"5"} == set(shown.by("gpu", MEMORY))


def test_whole_driver_that_hangs_is_left_alone(exporter: Exporter, node: Node) -> None:
    """When the question how many GPUs there are does not return, nothing else is asked, and scrapes answer at once."""
    node.hang("nvmlDeviceGetCount")
    late_scrape(exporter, node)
    calls = node.binding.calls.copy()
    shown = [scrape(exporter) for _ in range(5)][-1]

    assert calls == node.binding.calls
    until(lambda: 1 == node.threads())
    assert 0.0 == shown.value("nvml_up", reason="timeout")
    assert {"memory": 0.0, "samples": 1.0}.items() <= shown.by("collector", SUCCESS).items()


@pytest.mark.parametrize("call", [UTILIZATION, "nvmlDeviceGetUUID", "nvmlDeviceGetCount"])
def test_call_that_returns_is_asked_again(exporter: Exporter, node: Node, call: str) -> None:
    """Once the stuck call is back, the next scrape is complete, and no thread is left."""
    node.hang(call, None if call == "nvmlDeviceGetCount" else 5)
    late_scrape(exporter, node)
    scrape(exporter)
    node.release()

    assert ALL == set(scrape(exporter).by("gpu", MEMORY))
    assert dict.fromkeys(ALL, 1.0) == scrape(exporter).by("gpu", UP)


@pytest.mark.parametrize("code", [1, 15, 999])
def test_late_failure_disturbs_nothing(exporter: Exporter, node: Node, code: int) -> None:
    """What a stuck call says when it returns at last, nobody believes: the driver is not given up for it."""
    node.hang(UTILIZATION, gpu=5)
    node.binding.fail(UTILIZATION, code, gpu=5)
    late_scrape(exporter, node)
    scrape(exporter)
    node.release()
    node.binding.heal()

    assert 1.0 == scrape(exporter).value("nvml_up")
    assert 1 == node.binding.calls["nvmlInit"]


def test_hang_and_return_are_logged_once(
    exporter: Exporter, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says which GPU and collector, one that it is back, none for each scrape between."""
    caplog.set_level(logging.INFO)
    node.hang(UTILIZATION, gpu=5)
    late_scrape(exporter, node)
    for _ in range(3):
        scrape(exporter)
    node.release()
    for _ in range(2):
        scrape(exporter)

    begin, end = (message for message in caplog.messages if "GPU 5" in message)
    assert begin.startswith(
        f"GPU 5 ({uuid_of(5)}) did not answer the collector utilization within the deadline"
    )
    assert f"GPU 5 ({uuid_of(5)}) answers again" == end


def test_hung_driver_is_logged_once(
    exporter: Exporter, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """When no GPU is to blame the line names NVML."""
    node.hang("nvmlDeviceGetCount")
    late_scrape(exporter, node)
    scrape(exporter)

    assert 1 == sum(
        message.startswith("NVML did not answer within the deadline") for message in caplog.messages
    )


def test_closing_does_not_wait_for_a_hung_gpu(exporter: Exporter, node: Node) -> None:
    """NVML is not shut down under a call that still runs."""
    node.hang(UTILIZATION, gpu=5)
    late_scrape(exporter, node)
    scrape(exporter)
    exporter.close()

    assert 0 == node.binding.calls["nvmlShutdown"]
    until(lambda: 1 == node.threads())


def test_driver_that_fails_is_not_shut_down_under_a_hung_call(
    exporter: Exporter, node: Node
) -> None:
    """While a call on one GPU hangs, a failure of NVML as a whole waits for it with the shutdown."""
    node.hang(UTILIZATION, gpu=5)
    late_scrape(exporter, node)
    node.binding.fail("nvmlDeviceGetCount", 1)
    shown = scrape(exporter)

    assert 0.0 == shown.value("nvml_up", reason="uninitialized")
    assert 0 == node.binding.calls["nvmlShutdown"]


def test_deadline_that_the_end_cuts_short_is_not_blamed(
    open_exporter: OpenExporter, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the exporter while it waits for NVML tells the log of no GPU that was late."""
    node.hang(UTILIZATION, gpu=5)
    exporter = open_exporter(PyNvml(node.binding), deadline_seconds=300)
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(scrape, exporter)
        until(lambda: node.binding.waits)
        exporter.close()
        shown.result(60)

    assert [] == [message for message in caplog.messages if "deadline" in message]
