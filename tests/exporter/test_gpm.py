"""GPU performance monitoring: means over the time between two scrapes, neither too short nor too long."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from support.nvml_binding import FakeBinding

from torchmem.exporter.nvml.binding import Door
from torchmem.exporter.nvml.gpm import LONGEST_SECONDS, GpmWindows
from torchmem.exporter.values import Gpm, Transfer

UUID = "GPU-a"
VALUES = {2: 90.0, 3: 45.0, 5: 60.0, 10: 30.0, 20: 1.0, 21: 2.0, 60: 3.0, 61: 4.0}
MEANS = Gpm(0.9, 0.45, 0.6, 0.3, Transfer(3 << 20, 4 << 20), Transfer(2 << 20, 1 << 20))


class Node:
    """One Hopper, a clock that the test sets, and the samples that are allocated."""

    def __init__(self) -> None:
        self.now = 0.0
        self.values = dict(VALUES)
        self.spans: list[tuple[int, int]] = []
        self.allocated: set[int] = set()
        self.binding = FakeBinding(1)
        numbers = count(1)

        def allocate() -> int:
            self.allocated.add(number := next(numbers))
            return number

        self.binding.answers |= {
            "nvmlGpmQueryDeviceSupport": lambda gpu: SimpleNamespace(isSupportedDevice=1),
            "nvmlGpmSampleAlloc": allocate,
            "nvmlGpmSampleGet": lambda gpu, sample: sample,
            "nvmlGpmSampleFree": self.allocated.remove,
            "nvmlGpmMetricsGet": self._metrics,
        }
        self.windows = GpmWindows(Door(self.binding), clock=lambda: self.now)

    def _metrics(self, request: Any) -> Any:
        self.spans.append((request.sample1, request.sample2))
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in self.values else 3
            metric.value = self.values.get(metric.metricId, 0.0)
        return request

    def read(self, after: float) -> Gpm | None:
        """Ask some seconds later."""
        self.now += after
        return self.windows.read(UUID, 0)


@pytest.fixture
def node() -> Node:
    """A node whose GPU was never asked."""
    return Node()


def test_means_in_base_units(node: Node) -> None:
    """The first scrape has no window yet; then percent become ratios and MiB/s bytes per second."""
    assert [None, MEANS] == [node.read(0), node.read(15)]


def test_windows_follow_one_another(node: Node) -> None:
    """Each window begins where the last one ended, and only one sample is kept."""
    for _ in range(4):
        node.read(15)

    assert [(1, 2), (2, 3), (3, 4)] == node.spans
    assert {4} == node.allocated


def test_second_server_gets_the_same_answer(node: Node) -> None:
    """Two scrapes within a second see the same window, not a gap."""
    node.read(0)
    node.read(15)
    node.values.clear()

    assert MEANS == node.read(0.5)
    assert 1 == len(node.spans)


def test_long_silence_is_no_window(node: Node) -> None:
    """After ten minutes without a scrape the mean would say nothing about now."""
    node.read(0)

    assert [None, MEANS] == [node.read(LONGEST_SECONDS + 1), node.read(15)]


def test_single_values_may_be_missing(node: Node) -> None:
    """What NVML does not give, or gives as no number, is absent; the rest is there."""
    del node.values[60], node.values[61]
    node.values[5] = float("nan")
    node.read(0)
    means = node.read(15)
    assert means is not None

    assert (0.9, None, Transfer()) == (means.sm_active, means.tensor_active, means.nvlink)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nvmlGpmQueryDeviceSupport", 13),
        ("nvmlGpmSampleAlloc", 3),
        ("nvmlGpmSampleGet", 3),
        ("nvmlGpmMetricsGet", 3),
    ],
)
def test_without_support_there_is_nothing(node: Node, name: str, code: int) -> None:
    """GPUs before Hopper and older drivers have no means, and no sample is left allocated for nothing."""
    node.binding.fail(name, code)

    assert [None, None] == [node.read(0), node.read(15)]
    assert len(node.allocated) <= 1


def test_gpu_that_is_asked_in_vain_is_not_asked_again(node: Node) -> None:
    """Support does not come and go while NVML is up."""
    node.binding.answers["nvmlGpmQueryDeviceSupport"] = lambda gpu: SimpleNamespace(
        isSupportedDevice=0
    )
    for _ in range(3):
        node.read(15)

    assert 1 == node.binding.calls["nvmlGpmQueryDeviceSupport"]
    assert 0 == node.binding.calls["nvmlGpmSampleAlloc"]


def test_sample_is_freed_once(node: Node) -> None:
    """When NVML was closed while a call hung, what that call returns to is gone, and is not freed again."""
    node.read(0)
    node.binding.answers["nvmlGpmMetricsGet"] = lambda request: node.windows.forget_all_but(())

    assert node.read(15) is None
    assert set() == node.allocated


def test_samples_are_freed(node: Node) -> None:
    """Before NVML is shut down and when a GPU is gone, nothing is kept of it."""
    node.read(0)
    node.windows.forget_all_but(())

    assert set() == node.allocated
    assert node.read(15) is None
