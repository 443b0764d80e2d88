"""The simulated node: every NVML subject, in agreement with what the ranks do."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import Exposition, scrape

from torchmem.demo.activity import MAX_CHANGES, Activity
from torchmem.demo.gpus import EVENTS_PER_STEP, STEP_SECONDS, SharedGpus
from torchmem.demo.node import GIB, VERSIONS, SimulatedNode, cuda_bytes, uuid
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuValue
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.mig import Mig
from torchmem.exporter.subjects.nvlink import NvLink
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.temperature import Temperatures
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.metrics import catalog
from torchmem.simulator.scenarios import SCENARIOS

V = TypeVar("V", bound=GpuValue)
BADLY_COOLED = 3
# An H100 has no fans, remaps rows instead of retiring pages, and has memory of its own. PCIe
# throughput is read only on request. No GPU is lost, and no XID or process has come from a kernel.
NOT_REPORTED = {
    catalog.NVML_FAN_SPEED.name,
    catalog.NVML_RETIRED_PAGES.name,
    catalog.NVML_RETIRED_PAGES_PENDING.name,
    catalog.NVML_GPU_ERROR.name,
    catalog.NVML_GPU_ASSIGNMENT_INFO.name,
    catalog.NVML_GPU_ASSIGNED_EMPTY.name,
    catalog.NVML_MIG_ASSIGNMENT_INFO.name,
    catalog.NVML_MIG_ASSIGNED_EMPTY.name,
    catalog.NVML_PCIE_THROUGHPUT.name,
    catalog.NVML_PROCESS_INFO.name,
    catalog.NVML_XID_LAST.name,
}

levels = st.floats(0, 1)
changes = st.lists(st.tuples(st.floats(0, 1000), levels), max_size=20).map(
    lambda pairs: sorted(pairs, key=lambda pair: pair[0])
)


def value(gpu: FakeGpu, kind: type[V]) -> V:
    """Return the GPU's value of this type."""
    found = gpu.values[kind]
    assert isinstance(found, kind)
    return found


def busy_node(*gpus: int, seconds: float = 0.0, seed: int = 0) -> SimulatedNode:
    """A node of eight GPUs of which these are fully busy from a second on."""
    node = SimulatedNode(8, seed)
    for gpu in gpus:
        node.activities[gpu].change(seconds, 1.0)
    return node


def celsius(node: SimulatedNode, gpu: int, at: float) -> float:
    """Return the temperature of a GPU."""
    return value(node.gpus(at)[gpu], Temperatures).sensors["gpu"] or 0.0


def exposition(node: SimulatedNode, at: float) -> Exposition:
    """Return a scrape of the real exporter on this node, with a process of 60 GiB on each GPU."""
    processes = [{100 + gpu: 60 * GIB} for gpu in range(len(node.activities))]
    nvml = FakeNvml(lambda: node.gpus(at, processes), VERSIONS)
    exporter = Exporter(nvml, RunDirectory(Path("absent")), clock=lambda: at)
    try:
        return scrape(exporter)
    finally:
        exporter.close()


def test_every_subject_of_the_exporter_has_values() -> None:
    """The node reports every NVML metric of the catalog, and every collector succeeds."""
    node = SimulatedNode(2, mig=True)
    nvml = {name for name in catalog.CATALOG if name.startswith("nvml_")}
    page = exposition(node, 60)
    missing = {name for name in nvml if not page.series.get(name)}

    assert missing == NOT_REPORTED
    assert set(page.by("collector", catalog.COLLECTOR_SUCCESS.name).values()) == {1.0}


@given(changes, st.lists(st.floats(0, 2000), min_size=1, max_size=5), st.integers(0, 9))
def test_values_are_a_function_of_time_activity_and_seed(
    steps: list[tuple[float, float]], times: list[float], seed: int
) -> None:
    """Equal activities give equal values at a time, whatever was asked before."""
    first, second = SimulatedNode(1, seed), SimulatedNode(1, seed)
    for node in (first, second):
        for at, level in steps:
            node.activities[0].change(at, level)
    asked = {at: first.gpus(at)[0].values for at in times}

    assert asked == {at: second.gpus(at)[0].values for at in reversed(times)}


@given(changes, st.floats(0, 2000))
def test_values_are_within_the_ranges_of_an_h100(
    steps: list[tuple[float, float]], at: float
) -> None:
    """Utilization, power, temperature and clocks stay within the limits, busy or not."""
    node = busy_node()
    for time, level in steps:
        for activity in node.activities:
            activity.change(time, level)
    for gpu in node.gpus(at):
        power, heat = value(gpu, Power), value(gpu, Temperatures)
        assert all(0 <= (ratio or 0) <= 1 for ratio in value(gpu, Utilization).ratios().values())
        assert power.watts is not None
        assert 70 <= power.watts <= 702
        assert 25 <= (heat.sensors["gpu"] or 0) <= 89
        assert (heat.sensors["memory"] or 0) <= 95
        clocks = value(gpu, Clocks)
        assert all(
            (clocks.hertz[name] or 0) <= (most or 0) for name, most in clocks.max_hertz.items()
        )


def test_power_follows_utilization_at_once_and_heat_later() -> None:
    """When a rank starts, power jumps, and temperature rises for minutes; then both fall."""
    node = busy_node(0, seconds=100)
    node.activities[0].change(700, 0.0)

    def watts(at: float) -> float:
        return value(node.gpus(at)[0], Power).watts or 0.0

    assert [watts(at) > 550 for at in (99, 101, 699, 701)] == [False, True, True, False]
    assert [celsius(node, 0, at) > 45 for at in (101, 200, 710, 1000)] == [False, True, True, False]


def test_a_hot_gpu_is_throttled() -> None:
    """The badly cooled GPU reaches its limit, reports the reason, and lowers its clocks."""
    node = busy_node(0, BADLY_COOLED)
    cool, hot = (value(node.gpus(600)[gpu], Clocks) for gpu in (0, BADLY_COOLED))

    assert celsius(node, BADLY_COOLED, 600) == pytest.approx(87, abs=1)
    assert hot.throttle["sw_thermal_slowdown"]
    assert not cool.throttle["sw_thermal_slowdown"]
    assert (hot.hertz["sm"] or 0) < 0.97 * (hot.max_hertz["sm"] or 0)


def test_an_idle_gpu_reads_as_idle() -> None:
    """Without work: no utilization, low clocks, the reason gpu_idle, and about 70 W."""
    gpu = busy_node(1).gpus(300)[0]

    assert set(value(gpu, Utilization).ratios().values()) == {0}
    assert value(gpu, Clocks).throttle["gpu_idle"]
    assert value(gpu, Clocks).hertz["sm"] == 345e6


@given(changes, st.lists(st.floats(0, 5000), min_size=2, max_size=6).map(sorted))
def test_counters_never_fall(steps: list[tuple[float, float]], times: list[float]) -> None:
    """Energy, NVLink bytes, link errors and ECC errors only grow."""
    node = SimulatedNode(8)
    for at, level in steps:
        for activity in node.activities:
            activity.change(at, level)
    for before, after in zip(map(node.gpus, times), map(node.gpus, times[1:]), strict=False):
        for old, new in zip(before, after, strict=True):
            assert (value(old, Power).energy_joules or 0) <= (value(new, Power).energy_joules or 0)
            links, later = value(old, NvLink), value(new, NvLink)
            assert (links.transferred.rx or 0) <= (later.transferred.rx or 0)
            assert all(count <= later.errors[key] for key, count in links.errors.items())
            errors = value(new, Ecc).errors
            assert all(count <= errors[key] for key, count in value(old, Ecc).errors.items())


def test_an_hour_of_work_shows_the_defects() -> None:
    """Of eight busy GPUs, one corrected memory errors, one remapped a row, one has a bad link."""
    node = busy_node(*range(8))
    page = exposition(node, 3600)

    corrected = page.by("gpu", "nvml_ecc_errors_total", kind="corrected", scope="volatile")
    assert {gpu: count for gpu, count in corrected.items() if count} == {"1": 4.0, "4": 1.0}
    actions = page.by("gpu", "nvml_recovery_action", action="gpu_reset")
    assert [gpu for gpu, on in actions.items() if on] == ["4"]
    replays = page.by("gpu", "nvml_nvlink_errors_total", kind="replay")
    assert [gpu for gpu, count in replays.items() if count] == ["6"]
    assert [event.xid for event in node.events(0, 3600)] == [63]
    assert node.events(3600, 7200) == []


def test_one_gpu_exchanges_nothing() -> None:
    """The only GPU of a node has no NVLink traffic."""
    node = SimulatedNode(1)
    node.activities[0].change(0, 1.0)

    assert value(node.gpus(60)[0], NvLink).transferred.rx == 0


@given(
    st.sampled_from(sorted({scenario.gpu_bytes for scenario in SCENARIOS.values()})),
    st.lists(st.floats(0, 1 / 3), max_size=3),
)
def test_memory_adds_up(total: int, shares: list[float]) -> None:
    """Used + free + reserved = total, on a GPU, on a GPU in MIG mode, and in its instances."""
    sizes = [int(share * cuda_bytes(total)) for share in shares]
    gpus = SimulatedNode(1, total_bytes=total, mig=True).gpus(0, [dict(enumerate(sizes, 1))])
    of_gpus = [value(gpu, MemoryInfo) for gpu in gpus]
    instances = [item.memory for gpu in gpus for item in value(gpu, Mig).instances if item.memory]

    assert of_gpus[0].used == sum(sizes)
    assert len(instances) == 3
    for memory in [*of_gpus, *instances]:
        assert min(memory.used, memory.free, memory.reserved or 0) >= 0
        assert memory.used + memory.free + (memory.reserved or 0) == memory.total


def test_processes_that_do_not_fit_are_refused() -> None:
    """A node whose processes use more than a GPU has cannot be made."""
    node = SimulatedNode(1, total_bytes=11 * GIB)
    with pytest.raises(ValueError, match=f"{27 * GIB} bytes used"):
        node.gpus(0, [{1: 27 * GIB}])


def test_the_gpu_in_mig_mode_is_the_one_of_its_profiles() -> None:
    """Beside small GPUs, the GPU in MIG mode keeps the 80 GB that its profiles belong to."""
    small, divided = SimulatedNode(1, total_bytes=11 * GIB, mig=True).gpus(0)

    assert small.identity.name == "Simulated H100 11GB"
    assert divided.identity.name == "Simulated H100 80GB"
    assert value(divided, MemoryInfo).total == 80 * GIB


@given(changes, st.floats(0, 2000), st.floats(1, 100))
def test_what_follows_an_activity_lies_between_its_levels(
    steps: list[tuple[float, float]], at: float, seconds: float
) -> None:
    """Work is the integral of the level, and what follows the level never overshoots."""
    activity = Activity(steps)
    past = [level for time, level in steps if time <= at]

    assert 0 <= activity.smoothed(at, seconds) <= max([0.0, *past]) + 1e-9
    assert 0 <= activity.worked(at) <= at * max([0.0, *past]) + 1e-9


def test_an_activity_remembers_a_limited_number_of_changes() -> None:
    """Old changes are forgotten, but not the work that was done in them."""
    activity = Activity((float(second), second % 2) for second in range(4 * MAX_CHANGES))

    assert activity.worked(4.0 * MAX_CHANGES) == 2 * MAX_CHANGES
    with pytest.raises(ValueError, match="newest change"):
        activity.change(0.0, 1.0)


def test_a_stalled_rank_leaves_its_gpu_idle() -> None:
    """A GPU is as busy as its rank counts events, and idle when the rank stops counting."""
    now = [0.0]
    gpus = SharedGpus(SCENARIOS["fragmentation"], 2, get_context("spawn"), clock=lambda: now[0])
    nvml = gpus.nvml()

    def busy(seconds: float) -> list[float | None]:
        now[0] += seconds
        nvml.count()
        read = (nvml.read(Utilization, uuid(rank)) for rank in range(2))
        return [utilization.gpu for utilization in read if utilization]

    for _ in range(int(10 / STEP_SECONDS * EVENTS_PER_STEP)):
        gpus.use(0).count_event()
    assert busy(10) == [pytest.approx(0.95, abs=0.05), 0]
    assert busy(10) == [0, 0]
