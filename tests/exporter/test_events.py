"""XID errors and other events: each counted once, on the right GPU, through every failure, and seen by rates."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.exposition import Exposition, scrape
from support.nvml_binding import FakeBinding, uuid_of
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import GpuDownError, GpuIdentity, NvmlDownError
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.tally import MOST_XIDS, UNEXPECTED_XID_HOLD_SECONDS, Count
from torchmem.exporter.testing import FakeEvents, FakeGpu, FakeNvml
from torchmem.exporter.values import GpuEvent
from torchmem.sample.xids import XIDS as KNOWN_XIDS

OpenExporter = Callable[..., Exporter]
XIDS, LAST, EVENTS = "nvml_xid_errors_total", "nvml_xid_last_timestamp_seconds", "nvml_events_total"
A, B = "GPU-a", "GPU-b"
BOTH = frozenset({"xid", "double_bit_ecc_error"})
XID_BIT, DOUBLE_BIT, PSTATE_BIT = 0x8, 0x2, 0x4


def card(uuid: str, index: int, kinds: frozenset[str] = BOTH) -> FakeGpu:
    """A GPU that tells of these events."""
    return FakeGpu(GpuIdentity(index, uuid), event_kinds=kinds)


def until_shown(exporter: Exporter, name: str, value: float, **labels: str) -> Exposition:
    """The scrape in which this series has that value: events arrive in another thread."""

    def look() -> Exposition | None:
        shown = scrape(exporter)
        return shown if shown.value(name, **labels) == value else None

    found = until(look)
    assert found is not None
    return found


def test_each_event_counts_on_its_gpu(open_exporter: OpenExporter) -> None:
    """An XID counts by its code with the time it came, another event by its name; other GPUs stay at 0."""
    nvml = FakeNvml.of(card(A, 0), card(B, 1))
    exporter = open_exporter(nvml, clock=lambda: 1000.0)
    before = scrape(exporter)
    (events,) = nvml.subscriptions
    for event in (
        GpuEvent(B, "xid", 79),
        GpuEvent(B, "xid", 79),
        GpuEvent(A, "double_bit_ecc_error"),
    ):
        events.coming.put(event)

    shown = until_shown(exporter, EVENTS, 1.0, uuid=A, event="double_bit_ecc_error")

    assert 0.0 == before.value(XIDS, gpu="1", uuid=B, xid="79")
    assert 2.0 == shown.value(XIDS, gpu="1", uuid=B, xid="79")
    assert 0.0 == shown.value(XIDS, gpu="0", uuid=A, xid="79")
    assert {"79": 1000.0} == shown.by("xid", LAST)
    assert 0.0 == shown.value(EVENTS, uuid=B, event="double_bit_ecc_error")


def test_expected_xids_stand_at_zero() -> None:
    """A rate sees the first event of the frequent codes at once, for their series are there before it."""
    count = Count()
    count.expect(["xid"])

    assert dict.fromkeys(KNOWN_XIDS, 0) == count.tally(0.0).xids


def test_event_before_the_first_scrape_is_seen_as_a_rise() -> None:
    """Whatever came earlier, a counter is 0 the first time it is shown, and right the second time."""
    count = Count()
    count.expect(["xid", "fatal_poison_error"])
    count.add("xid", 79, 1.0)
    count.add("fatal_poison_error", None, 1.0)

    first, second = count.tally(2.0), count.tally(3.0)

    assert (0, 0) == (first.xids[79], first.events["fatal_poison_error"])
    assert (1, 1) == (second.xids[79], second.events["fatal_poison_error"])
    assert {79: 1.0} == first.xid_times


@pytest.mark.parametrize("xid", [62, 143, 4711])
def test_unexpected_xid_is_shown_at_zero_for_a_minute(xid: int) -> None:
    """Any other code has its timestamp at once, and its count when every server has seen the 0."""
    count = Count()
    count.expect(["xid"])
    count.tally(0.0)
    count.add("xid", xid, 10.0)

    early, late = count.tally(11.0), count.tally(10.0 + UNEXPECTED_XID_HOLD_SECONDS)

    assert (0, {xid: 10.0}) == (early.xids[xid], early.xid_times)
    assert {xid: 1} == {code: times for code, times in late.xids.items() if times}


def test_codes_are_bounded() -> None:
    """A driver that invents codes does not fill Prometheus."""
    count = Count()
    for xid in range(10 * MOST_XIDS):
        count.add("xid", xid, 0.0)

    assert MOST_XIDS == len(count.tally(0.0).xids)


def test_gpus_without_events_have_no_series(open_exporter: OpenExporter) -> None:
    """Where NVML does not tell, there is no 0 that would mean all is well."""
    shown = scrape(
        open_exporter(FakeNvml.of(card(A, 0, frozenset()), card(B, 1, frozenset({"xid"}))))
    )

    assert {B} == set(shown.by("uuid", XIDS))
    assert {} == shown.matching(EVENTS)


@pytest.mark.parametrize(
    "error", [GpuDownError(15), NvmlDownError("uninitialized"), ValueError("unforeseen")]
)
def test_broken_wait_is_taken_up_again(open_exporter: OpenExporter, error: Exception) -> None:
    """When waiting fails, the next scrape subscribes anew; counts go on from where they were."""
    nvml = FakeNvml.of(card(A, 0))
    exporter = open_exporter(nvml)
    scrape(exporter)
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 79))
    nvml.subscriptions[0].coming.put(error)
    until(lambda: nvml.subscriptions[0].is_closed)
    scrape(exporter)
    nvml.subscriptions[1].coming.put(GpuEvent(A, "xid", 79))

    until_shown(exporter, XIDS, 2.0, xid="79")


def test_subscription_outlives_a_lost_gpu_and_renews_for_one_that_comes_back(
    open_exporter: OpenExporter,
) -> None:
    """The others' events are not missed while one GPU is away, and its counters stay; on return it is watched again."""
    cards = [card(A, 0), card(B, 1)]
    nvml = FakeNvml(lambda: cards)
    exporter = open_exporter(nvml)
    scrape(exporter)
    gone = cards.pop()
    without = scrape(exporter)
    while_gone = len(nvml.subscriptions)
    cards.append(gone)
    scrape(exporter)

    assert 0.0 == without.value("nvml_gpu_up", uuid=B)
    assert 0.0 == without.value(XIDS, uuid=B, xid="79")
    assert (1, 2) == (while_gone, len(nvml.subscriptions))
    assert nvml.subscriptions[0].is_closed


def test_driver_failure_ends_the_subscription(open_exporter: OpenExporter) -> None:
    """When NVML must be brought up anew, nothing holds the old one."""
    answers = iter([[card(A, 0)]])

    def gpus() -> list[FakeGpu]:
        found = next(answers, None)
        if found is None:
            raise NvmlDownError("driver_not_loaded")
        return found

    nvml = FakeNvml(gpus)
    exporter = open_exporter(nvml)
    scrape(exporter)
    shown = scrape(exporter)

    assert 0.0 == shown.value("nvml_up", reason="driver_not_loaded")
    assert 0.0 == shown.value(XIDS, uuid=A, xid="79")
    until(lambda: nvml.subscriptions[0].is_closed)


def test_closing_ends_the_thread(open_exporter: OpenExporter) -> None:
    """Nothing waits for events once the exporter is closed, and no scrape that is late starts it again."""
    nvml = FakeNvml.of(card(A, 0))
    exporter = open_exporter(nvml)
    scrape(exporter)
    exporter.close()
    scrape(exporter)

    assert [True] == [events.is_closed for events in nvml.subscriptions]


def test_thread_that_hangs_in_nvml_is_not_doubled(open_exporter: OpenExporter) -> None:
    """Two threads on two subscriptions would count an event twice."""

    class Stuck(FakeEvents):
        def wait(self, seconds: float) -> GpuEvent | None:
            """Returns when the test ends."""
            self.coming.get()
            return None

    class StuckNvml(FakeNvml):
        def subscribe(self, uuids: object) -> FakeEvents:
            """One more subscription that hangs."""
            self.subscriptions.append(Stuck({A: BOTH}))
            return self.subscriptions[-1]

    cards = [card(A, 0)]
    nvml = StuckNvml(lambda: cards)
    exporter = open_exporter(nvml)
    scrape(exporter)
    cards.append(card(B, 1))
    shown = scrape(exporter)
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 1))

    assert 1 == len(nvml.subscriptions)
    assert 1.0 == shown.value("nvml_gpu_up", uuid=B)


@pytest.fixture
def binding() -> FakeBinding:
    """Two GPUs with events."""
    binding = FakeBinding(2)
    binding.answers |= {
        "nvmlEventSetCreate": lambda: "set",
        "nvmlEventSetFree": lambda events: None,
        "nvmlDeviceGetSupportedEventTypes": lambda gpu: XID_BIT | DOUBLE_BIT | PSTATE_BIT,
        "nvmlDeviceRegisterEvents": lambda gpu, mask, events: None,
        "nvmlEventSetWait_v2": lambda events, milliseconds: None,
    }
    return binding


def subscribed(binding: FakeBinding) -> PyNvml:
    """NVML, open, its GPUs listed."""
    nvml = PyNvml(binding)
    nvml.open()
    for index in range(nvml.count()):
        nvml.gpu(index)
    return nvml


def test_nvml_events_are_told_apart(binding: FakeBinding) -> None:
    """GPU, kind and XID come from the event data; a timeout and what has no name are nothing."""
    coming = [(1, XID_BIT, 79), (0, DOUBLE_BIT, 0), (0, 1 << 40, 0)]

    def wait(events: str, milliseconds: int) -> SimpleNamespace:
        if not coming:
            raise binding.NVMLError(10)
        gpu, kind, data = coming.pop(0)
        return SimpleNamespace(device=gpu, eventType=kind, eventData=data)

    events = subscribed(binding).subscribe([uuid_of(0), uuid_of(1)])
    assert events is not None
    binding.answers["nvmlEventSetWait_v2"] = wait

    assert {uuid_of(0): BOTH, uuid_of(1): BOTH} == events.kinds
    assert GpuEvent(uuid_of(1), "xid", 79) == events.wait(0.5)
    assert GpuEvent(uuid_of(0), "double_bit_ecc_error") == events.wait(0.5)
    assert [None, None] == [events.wait(0.5), events.wait(0.5)]


def test_gpu_that_cannot_register_is_left_out(binding: FakeBinding) -> None:
    """One GPU without events does not cost another's."""
    binding.fail("nvmlDeviceRegisterEvents", 3, gpu=0)
    events = subscribed(binding).subscribe([uuid_of(0), uuid_of(1)])
    assert events is not None

    assert {uuid_of(1)} == set(events.kinds)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nvmlEventSetCreate", 3),
        ("nvmlDeviceGetSupportedEventTypes", 3),
        ("nvmlDeviceRegisterEvents", 3),
        ("nvmlEventSetWait_v2", 13),
    ],
)
def test_unsupported_events_leave_nothing_open(binding: FakeBinding, name: str, code: int) -> None:
    """Without events there is no subscription, and every nvmlInit has its nvmlShutdown."""
    nvml = subscribed(binding)
    binding.fail(name, code)

    assert nvml.subscribe([uuid_of(0), uuid_of(1)]) is None
    nvml.close()
    assert binding.calls["nvmlInit"] == binding.calls["nvmlShutdown"]
