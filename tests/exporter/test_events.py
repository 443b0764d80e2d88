"""XID errors and other events: each is counted once, on its GPU, and visible to rate()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.exposition import Exposition, scrape
from support.fake_nvml import FakeNode
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeEvents, FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuEvent, GpuIdentity
from torchmem.exporter.nvml import GpuLostError, NvmlDownError
from torchmem.exporter.subjects.xid_events import (
    MAX_XIDS,
    UNLISTED_XID_HOLD_SECONDS,
    EventCounter,
    NvmlEvents,
)
from torchmem.sample.xids import XIDS as LISTED_XIDS

OpenExporter = Callable[..., Exporter]
XIDS, LAST, EVENTS = "nvml_xid_errors_total", "nvml_xid_last_timestamp_seconds", "nvml_events_total"
A, B = "GPU-a", "GPU-b"
BOTH = frozenset({"xid", "double_bit_ecc_error"})
XID_BIT, DOUBLE_BIT, PSTATE_BIT = 0x8, 0x2, 0x4


def fake_gpu(uuid: str, index: int, kinds: frozenset[str] = BOTH) -> FakeGpu:
    """Return a GPU that reports these events."""
    return FakeGpu(GpuIdentity(index, uuid), event_kinds=kinds)


def scrape_until(exporter: Exporter, name: str, value: float, **labels: str) -> Exposition:
    """Scrape until this series has that value: events arrive in another thread."""

    def attempt() -> Exposition | None:
        exposition = scrape(exporter)
        return exposition if exposition.value(name, **labels) == value else None

    return until(attempt)


def test_each_event_counts_on_its_gpu(open_exporter: OpenExporter) -> None:
    """An XID counts by code, with its time, another event by name; other GPUs stay at 0."""
    nvml = FakeNvml.of(fake_gpu(A, 0), fake_gpu(B, 1))
    exporter = open_exporter(nvml, clock=lambda: 1000.0)
    before = scrape(exporter)
    (events,) = nvml.subscriptions
    for event in (
        GpuEvent(B, "xid", 79),
        GpuEvent(B, "xid", 79),
        GpuEvent(A, "double_bit_ecc_error"),
    ):
        events.coming.put(event)

    exposition = scrape_until(exporter, EVENTS, 1.0, uuid=A, event="double_bit_ecc_error")

    assert before.value(XIDS, gpu="1", uuid=B, xid="79") == 0.0
    assert exposition.value(XIDS, gpu="1", uuid=B, xid="79") == 2.0
    assert exposition.value(XIDS, gpu="0", uuid=A, xid="79") == 0.0
    assert exposition.by("xid", LAST) == {"79": 1000.0}
    assert exposition.value(EVENTS, uuid=B, event="double_bit_ecc_error") == 0.0


@pytest.fixture
def counter() -> EventCounter:
    """The counter of a GPU that reports XIDs and poison errors."""
    counter = EventCounter()
    counter.expect(["xid", "fatal_poison_error"])
    return counter


def test_listed_xids_start_at_zero(counter: EventCounter) -> None:
    """rate() sees the first event of a listed XID, because its series is there before."""
    assert dict.fromkeys(LISTED_XIDS, 0) == counter.totals(0.0).xids


def test_event_before_the_first_scrape_is_an_increase(counter: EventCounter) -> None:
    """Whatever came earlier, a counter is 0 when it is first exposed, and right the second time."""
    counter.add(GpuEvent(A, "xid", 79), 1.0)
    counter.add(GpuEvent(A, "fatal_poison_error"), 1.0)

    first, second = counter.totals(2.0), counter.totals(3.0)

    assert (first.xids[79], first.events["fatal_poison_error"]) == (0, 0)
    assert (second.xids[79], second.events["fatal_poison_error"]) == (1, 1)
    assert first.xid_times == {79: 1.0}


@pytest.mark.parametrize("xid", [62, 143, 4711])
def test_unlisted_xid_is_zero_for_a_minute(counter: EventCounter, xid: int) -> None:
    """Its timestamp is exposed immediately, its count when every Prometheus has seen the 0."""
    counter.totals(0.0)
    counter.add(GpuEvent(A, "xid", xid), 10.0)

    early, late = counter.totals(11.0), counter.totals(10.0 + UNLISTED_XID_HOLD_SECONDS)

    assert (early.xids[xid], early.xid_times) == (0, {xid: 10.0})
    assert {code: times for code, times in late.xids.items() if times} == {xid: 1}


def test_xids_are_bounded() -> None:
    """A driver that invents codes does not fill Prometheus."""
    counter = EventCounter()
    for xid in range(10 * MAX_XIDS):
        counter.add(GpuEvent(A, "xid", xid), 0.0)

    assert len(counter.totals(0.0).xids) == MAX_XIDS


def test_gpus_without_events_have_no_series(open_exporter: OpenExporter) -> None:
    """Where events are not supported, no 0 is exported, which would look like no error."""
    exposition = scrape(
        open_exporter(FakeNvml.of(fake_gpu(A, 0, frozenset()), fake_gpu(B, 1, frozenset({"xid"}))))
    )

    assert set(exposition.by("uuid", XIDS)) == {B}
    assert exposition.matching(EVENTS) == {}


@pytest.mark.parametrize(
    "error", [GpuLostError(15), NvmlDownError("uninitialized"), ValueError("unforeseen")]
)
def test_failed_wait_is_started_again(open_exporter: OpenExporter, error: Exception) -> None:
    """When waiting fails, the next scrape subscribes again, and the counts continue."""
    nvml = FakeNvml.of(fake_gpu(A, 0))
    exporter = open_exporter(nvml)
    scrape(exporter)
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 79))
    nvml.subscriptions[0].coming.put(error)
    until(lambda: nvml.subscriptions[0].is_closed)
    scrape(exporter)
    nvml.subscriptions[1].coming.put(GpuEvent(A, "xid", 79))

    scrape_until(exporter, XIDS, 2.0, xid="79")


def test_failed_subscription_is_repeated(open_exporter: OpenExporter) -> None:
    """A subscription that fails costs the scrape nothing, and the next scrape tries again."""
    errors: list[Exception] = [GpuLostError(15)]

    def fail_once(call: object, _gpu: object) -> None:
        if call == "subscribe" and errors:
            raise errors.pop()

    nvml = FakeNvml(lambda: [fake_gpu(A, 0)], on_call=fail_once)
    exporter = open_exporter(nvml)
    without, with_events = scrape(exporter), scrape(exporter)

    assert without.value("nvml_up") == 1.0
    assert without.matching(XIDS) == {}
    assert with_events.value(XIDS, uuid=A, xid="79") == 0.0


def test_subscription_outlives_a_lost_gpu_and_renews_for_one_that_comes_back(
    open_exporter: OpenExporter,
) -> None:
    """A lost GPU keeps its counters, the others stay watched, and after its return all are.

    The old subscription counts until its wait ends. Only then is there another one, because
    nvmlEventSetCreate does not return while a thread is in nvmlEventSetWait.
    """
    fake_gpus = [fake_gpu(A, 0), fake_gpu(B, 1)]
    nvml = FakeNvml(lambda: fake_gpus)
    exporter = open_exporter(nvml)
    scrape(exporter)
    until(lambda: nvml.subscriptions[0].waits)
    gone = fake_gpus.pop()
    without = scrape(exporter)
    fake_gpus.append(gone)
    scrape(exporter)
    while_waiting = len(nvml.subscriptions)
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 79))
    until(lambda: nvml.subscriptions[0].is_closed)

    assert without.value("nvml_gpu_up", uuid=B) == 0.0
    assert without.value(XIDS, uuid=B, xid="79") == 0.0
    assert while_waiting == 1
    until(lambda: scrape(exporter) and len(nvml.subscriptions) == 2)
    nvml.subscriptions[1].coming.put(GpuEvent(B, "xid", 79))
    exposition = scrape_until(exporter, XIDS, 1.0, uuid=B, xid="79")
    assert exposition.value(XIDS, uuid=A, xid="79") == 1.0


def test_driver_failure_ends_the_subscription(open_exporter: OpenExporter) -> None:
    """When NVML must be opened again, no subscription keeps the old one open."""
    answers = iter([[fake_gpu(A, 0)]])

    def gpus() -> list[FakeGpu]:
        fake_gpus = next(answers, None)
        if fake_gpus is None:
            raise NvmlDownError("driver_not_loaded")
        return fake_gpus

    nvml = FakeNvml(gpus)
    exporter = open_exporter(nvml)
    scrape(exporter)
    exposition = scrape(exporter)

    assert exposition.value("nvml_up", reason="driver_not_loaded") == 0.0
    assert exposition.value(XIDS, uuid=A, xid="79") == 0.0
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 79))
    until(lambda: nvml.subscriptions[0].is_closed)


def test_closing_ends_the_thread(open_exporter: OpenExporter) -> None:
    """Once the exporter is closed nothing waits for events, not even after a late scrape."""
    nvml = FakeNvml.of(fake_gpu(A, 0))
    exporter = open_exporter(nvml)
    scrape(exporter)
    exporter.close()
    scrape(exporter)
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 79))

    until(lambda: nvml.subscriptions[0].is_closed)
    assert len(nvml.subscriptions) == 1


def test_a_wait_that_hangs_in_nvml_costs_only_events(open_exporter: OpenExporter) -> None:
    """Scrapes are complete, no second thread waits, and events come again once it has returned."""

    class Stuck(FakeEvents):
        def wait(self, seconds: float) -> GpuEvent | None:
            """Return when the test ends."""
            self.coming.get()
            return None

    class StuckNvml(FakeNvml):
        def subscribe(self, uuids: object) -> FakeEvents:
            """Add a subscription that hangs."""
            self.subscriptions.append(Stuck({A: BOTH}))
            return self.subscriptions[-1]

    fake_gpus = [fake_gpu(A, 0)]
    nvml = StuckNvml(lambda: fake_gpus)
    exporter = open_exporter(nvml)
    scrape(exporter)
    fake_gpus.append(fake_gpu(B, 1))
    scrape(exporter)
    exposition = scrape(exporter)
    while_stuck = len(nvml.subscriptions)
    nvml.subscriptions[0].coming.put(GpuEvent(A, "xid", 79))

    until(lambda: scrape(exporter) and len(nvml.subscriptions) == 2)
    assert while_stuck == 1
    assert exposition.value("nvml_gpu_up", uuid=B) == 1.0
    nvml.subscriptions[1].coming.put(GpuEvent(A, "xid", 79))


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """Two GPUs with XIDs, double-bit ECC errors and changes of the performance state."""
    node = FakeNode(tmp_path / "node", "zero_gpus")
    kinds = XID_BIT | DOUBLE_BIT | PSTATE_BIT
    node.write(
        f"[gpu *]\nSupportedEventTypes = {kinds}\n[gpu 0]\nUUID = {A}\n[gpu 1]\nUUID = {B}\n"
    )
    return node


@pytest.fixture
def subscribe(node: FakeNode) -> Iterator[Callable[[], NvmlEvents | None]]:
    """A function that subscribes to the events of both GPUs."""
    nvml = node.nvml()
    nvml.open()
    uuids = [gpu.uuid for gpu in map(nvml.gpu, range(nvml.count())) if isinstance(gpu, GpuIdentity)]
    subscriptions = []

    def subscribe() -> NvmlEvents | None:
        events = nvml.subscribe(uuids)
        assert events is None or isinstance(events, NvmlEvents)
        if events:
            subscriptions.append(events)
        return events

    yield subscribe
    for events in subscriptions:
        events.close()
    nvml.close()


Subscribe = Callable[[], NvmlEvents | None]


def test_events_have_gpu_kind_and_xid(node: FakeNode, subscribe: Subscribe) -> None:
    """A timeout and an event of an unknown kind are not counted."""
    events = subscribe()
    assert events is not None
    node.change("node", **{"event.1": f"1 {XID_BIT} 79", "event.2": f"0 {DOUBLE_BIT} 0"})

    assert events.kinds == {A: BOTH, B: BOTH}
    assert GpuEvent(B, "xid", 79) == events.wait(0.5)
    assert GpuEvent(A, "double_bit_ecc_error") == events.wait(0.5)
    assert events.wait(0.01) is None


def test_event_of_an_unknown_gpu_is_ignored(node: FakeNode, subscribe: Subscribe) -> None:
    """A GPU that has no UUID any more cannot be counted."""
    events = subscribe()
    assert events is not None
    node.change("gpu 1", nvmlDeviceGetUUID="not_supported")
    node.change("node", **{"event.1": f"1 {XID_BIT} 79"})

    assert events.wait(0.5) is None


def test_gpu_that_cannot_register_is_left_out(node: FakeNode, subscribe: Subscribe) -> None:
    """One GPU without events does not cost the events of another."""
    node.change("gpu 0", nvmlDeviceRegisterEvents="not_supported")
    events = subscribe()
    assert events is not None

    assert set(events.kinds) == {B}


def test_lost_gpu_ends_the_wait(node: FakeNode, subscribe: Subscribe) -> None:
    """A failure of the wait is an error, not a timeout."""
    events = subscribe()
    assert events is not None
    node.change("node", nvmlEventSetWait_v2="gpu_is_lost")

    with pytest.raises(GpuLostError):
        events.wait(0.5)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nvmlEventSetCreate", "not_supported"),
        ("nvmlDeviceGetSupportedEventTypes", "not_supported"),
        ("nvmlDeviceRegisterEvents", "not_supported"),
        ("nvmlEventSetWait_v2", "function_not_found"),
    ],
)
def test_unsupported_events_leave_nothing_open(
    node: FakeNode, subscribe: Subscribe, name: str, code: str
) -> None:
    """Without events there is no subscription, and its nvmlInit is undone."""
    node.change("node", **{name: code})

    assert subscribe() is None
    assert node.calls("nvmlInitWithFlags") == node.calls("nvmlShutdown") + 1
