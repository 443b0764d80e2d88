"""Each value of a GPU, read through nvidia-ml-py: in base units, absent where unavailable."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_nvml import FakeNode
from support.waiting import until

from torchmem.exporter.driver import PyNvml
from torchmem.exporter.gpus import GpuIdentity, GpuValue, Versions
from torchmem.exporter.nvml import SELDOM_SECONDS
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.gpm import MAX_WINDOW_SECONDS, Gpm
from torchmem.exporter.subjects.memory import (
    Bar1,
    ImpossibleMemoryError,
    MemoryInfo,
    UnifiedMemory,
)
from torchmem.exporter.subjects.mig import Mig
from torchmem.exporter.subjects.nvlink import NvLink
from torchmem.exporter.subjects.pcie import Pcie, PcieThroughput, Traffic
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes, ProcessMemory, ProcessUtilization
from torchmem.exporter.subjects.temperature import Fans, Temperatures
from torchmem.exporter.subjects.utilization import Utilization

V = TypeVar("V", bound=GpuValue)
UUID = "GPU-a"
MIB, GIB = 1 << 20, 1 << 30


class GpuUnderTest:
    """A node with one GPU, on which a test makes values available by their lines in the file."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_000_000.0
        self.node = FakeNode(folder, "zero_gpus")
        self.node.write(f"[gpu 0]\nUUID = {UUID}\n")
        self.nvml: PyNvml = self.node.nvml(clock=lambda: self.now, monotonic=lambda: self.now)
        self.nvml.open()
        self.identify()

    def identify(self) -> GpuIdentity:
        """Identify the GPU again, as each reading does."""
        identity = self.nvml.gpu(0)
        assert isinstance(identity, GpuIdentity)
        return identity

    def set(self, **values: object) -> None:
        """Change values of the GPU."""
        self.node.change("gpu 0", **values)

    def set_fields(self, values: dict[object, int]) -> None:
        """Change field values, by id or by "id.all" for the sum over all links."""
        self.set(**{f"FieldValue.{field}": f"ull {value}" for field, value in values.items()})

    def read(self, kind: type[V]) -> V | None:
        """Read a value."""
        return self.nvml.read(kind, UUID)

    def read_later(self, kind: type[V]) -> V | None:
        """Read a value when those that hardly ever change are due again."""
        self.now += SELDOM_SECONDS
        return self.read(kind)


@pytest.fixture
def gpu(tmp_path: Path) -> GpuUnderTest:
    """A GPU on which nothing is available."""
    return GpuUnderTest(tmp_path / "node")


def test_unavailable_values_are_absent(gpu: GpuUnderTest) -> None:
    """On a GPU that supports nothing, no value is 0."""
    assert [Utilization(), Power(), Clocks({}, {}), Pcie(), Ecc(), NvLink(), Fans([])] == [
        gpu.read(Utilization),
        gpu.read(Power),
        without_unknown(gpu.read(Clocks)),
        gpu.read(Pcie),
        gpu.read(Ecc),
        gpu.read(NvLink),
        gpu.read(Fans),
    ]
    assert Repairs(retired_pages={"multiple_single_bit": None, "double_bit": None}) == gpu.read(
        Repairs
    )
    assert PcieThroughput(Traffic()) == gpu.read(PcieThroughput)
    assert [gpu.read(kind) for kind in (MemoryInfo, Bar1, Mig, Gpm, Processes)] == [None] * 5


def without_unknown(clocks: Clocks | None) -> Clocks:
    """Leave out the domains without a value."""
    assert clocks
    hertz = {domain: value for domain, value in clocks.hertz.items() if value is not None}
    max_hertz = {domain: value for domain, value in clocks.max_hertz.items() if value is not None}
    return Clocks(hertz, max_hertz, clocks.throttle, clocks.performance_state)


def test_versions(gpu: GpuUnderTest) -> None:
    """CUDA's number is written as people write it."""
    gpu.node.change(
        "node",
        SystemGetDriverVersion="580.65.06",
        SystemGetNVMLVersion="13.580.65.06",
        SystemGetCudaDriverVersion=12_080,
    )

    assert Versions("580.65.06", "13.580.65.06", "12.8") == gpu.nvml.versions()


def test_identity(gpu: GpuUnderTest) -> None:
    """The identity is complete; modes are words, and an unknown mode is absent."""
    gpu.node.change("node", SystemGetDriverVersion="580.65.06")
    gpu.set(
        Name="NVIDIA H100 80GB HBM3",
        PciInfo="00000000:18:00.0",
        VbiosVersion="96.00.A5.00.01",
        ComputeMode=3,
        PersistenceMode=7,
    )
    gpu.now += SELDOM_SECONDS

    assert (
        GpuIdentity(
            0,
            UUID,
            "NVIDIA H100 80GB HBM3",
            "00000000:18:00.0",
            "580.65.06",
            "96.00.A5.00.01",
            "exclusive_process",
            None,
        )
        == gpu.identify()
    )


def test_memory(gpu: GpuUnderTest) -> None:
    """Bytes, with what the driver reserves."""
    gpu.set(MemoryInfo=f"{80 * GIB} {GIB} {77 * GIB} {2 * GIB}")

    assert MemoryInfo(80 * GIB, 2 * GIB, 77 * GIB, GIB) == gpu.read(MemoryInfo)


@pytest.mark.parametrize("code", ["function_not_found", "argument_version_mismatch"])
def test_older_driver_reports_no_reserved_memory(
    gpu: GpuUnderTest, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """Version 1 of the function is used: `reserved` is absent, and nothing is logged."""
    caplog.set_level(logging.INFO)
    gpu.nvml.end_reading()
    caplog.clear()
    gpu.set(MemoryInfo="80 1 77 2", nvmlDeviceGetMemoryInfo_v2=code)

    assert MemoryInfo(80, 3, 77, None) == gpu.read(MemoryInfo)
    gpu.nvml.end_reading()
    assert caplog.messages == []


def test_value_that_no_version_returns_is_logged(
    gpu: GpuUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the older function fails too, this is logged once, after the reading."""
    caplog.set_level(logging.INFO)
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        gpu.set(**{function: "function_not_found"})
    gpu.nvml.end_reading()
    caplog.clear()

    for _ in range(2):
        assert gpu.read(MemoryInfo) is None
        gpu.nvml.end_reading()
    assert caplog.messages == [
        "NVML returns no value: function not found (code 13): nvmlDeviceGetMemoryInfo"
    ]


@pytest.mark.parametrize(
    ("total", "used", "free"),
    [(80 * GIB, 27 * GIB, 55 * GIB), (80 * GIB, 81 * GIB, 0), (2**60, 1, 1)],
    ids=["more than the whole", "a part that is larger", "more than any GPU has"],
)
def test_impossible_memory(
    gpu: GpuUnderTest, caplog: pytest.LogCaptureFixture, total: int, used: int, free: int
) -> None:
    """Parts that are more than the whole are absent, and are logged once."""
    gpu.set(MemoryInfo=f"{total} {GIB} {free} {used}")
    gpu.nvml.end_reading()
    caplog.clear()

    for _ in range(2):
        assert gpu.read(MemoryInfo) is None
        gpu.nvml.end_reading()
    (message,) = caplog.messages
    assert message == (
        "NVML returns an impossible value, which is not used: nvmlDeviceGetMemoryInfo: "
        f"{used} bytes used, {free} free and {GIB} reserved of {total}"
    )


@given(st.lists(st.integers(-3 * GIB, 30 * GIB), min_size=3, max_size=3), st.integers(0, 40 * GIB))
def test_no_impossible_memory_exists(parts: list[int], total: int) -> None:
    """Memory cannot be made of parts below zero, or of parts that are more than the whole."""
    used, free, reserved = parts
    if min(parts) < 0 or sum(parts) > total + MIB:
        with pytest.raises(ImpossibleMemoryError):
            MemoryInfo(total, used, free, reserved)
    else:
        assert MemoryInfo(total, used, free, reserved).total == total


@pytest.mark.parametrize(
    ("memory", "unified"),
    [
        ("80 1 77 2", UnifiedMemory(False)),
        ("not_supported", UnifiedMemory(True)),
        ("no_permission", None),
    ],
)
def test_unified_memory(gpu: GpuUnderTest, memory: str, unified: UnifiedMemory | None) -> None:
    """Unsupported memory is shared with the CPU; without permission it is unknown."""
    gpu.set(MemoryInfo=memory)

    assert unified == gpu.read(UnifiedMemory)


def test_bar1(gpu: GpuUnderTest) -> None:
    """Bytes."""
    gpu.set(BAR1MemoryInfo=f"{128 * GIB} {127 * GIB} {GIB}")

    assert Bar1(128 * GIB, GIB) == gpu.read(Bar1)


def test_utilization(gpu: GpuUnderTest) -> None:
    """Percentages become ratios; the sampling period is dropped."""
    gpu.set(
        UtilizationRates="97 41",
        EncoderUtilization="10 167000",
        DecoderUtilization="20 167000",
        JpgUtilization="30 167000",
        OfaUtilization="40 167000",
    )

    assert Utilization(0.97, 0.41, 0.1, 0.2, 0.3, 0.4) == gpu.read(Utilization)


def test_power(gpu: GpuUnderTest) -> None:
    """Milliwatts become watts, millijoules joules."""
    gpu.set(
        PowerUsage=412_500,
        EnforcedPowerLimit=650_000,
        PowerManagementLimitConstraints="200000 700000",
        TotalEnergyConsumption=5_000_000_000,
    )

    assert Power(412.5, 650.0, 700.0, 5_000_000.0) == gpu.read(Power)


@pytest.mark.parametrize(
    ("milliwatts", "watts"),
    [(664_074, 664.074), (700_001, 700.001), (1, 0.001), ((1 << 32) - 1, None)],
)
def test_units_add_no_noise(gpu: GpuUnderTest, milliwatts: int, watts: float | None) -> None:
    """A value has no digits from the conversion, and NVML's "not available" is not a number."""
    gpu.set(PowerUsage=milliwatts)

    assert Power(watts) == gpu.read(Power)


def test_temperatures(gpu: GpuUnderTest) -> None:
    """Sensors and thresholds by name; a threshold that the GPU does not have is unknown."""
    gpu.set(Temperature=61, TemperatureThreshold="92 89 - 87")
    gpu.set_fields({82: 70})
    thresholds = {"shutdown": 92, "slowdown": 89, "memory_max": None, "gpu_max": 87}

    assert Temperatures({"gpu": 61, "memory": 70}, thresholds) == gpu.read(Temperatures)


def test_driver_without_field_values(gpu: GpuUnderTest) -> None:
    """The sensor that is read as a field value is unknown, the other one is there."""
    gpu.set(Temperature=61, nvmlDeviceGetFieldValues="function_not_found")
    temperatures = gpu.read(Temperatures)
    assert temperatures

    assert temperatures.sensors == {"gpu": 61, "memory": None}


def test_older_driver_has_the_older_temperature_function(gpu: GpuUnderTest) -> None:
    """nvmlDeviceGetTemperature is used where nvmlDeviceGetTemperatureV is missing."""
    gpu.set(Temperature=61, nvmlDeviceGetTemperatureV="function_not_found")
    temperatures = gpu.read(Temperatures)
    assert temperatures

    assert temperatures.sensors["gpu"] == 61


def test_clocks(gpu: GpuUnderTest) -> None:
    """Megahertz become hertz; every reason is reported, active or not."""
    gpu.set(
        ClockInfo="1980 1755 2619 0xffffffff",
        MaxClockInfo="1980 1980 2619 1545",
        CurrentClocksEventReasons=0x4 | 0x40,
        PerformanceState=2,
    )
    clocks = gpu.read(Clocks)
    assert clocks

    assert clocks.hertz == {"graphics": 1.98e9, "sm": 1.755e9, "memory": 2.619e9, "video": None}
    assert clocks.max_hertz["video"] == 1.545e9
    active = {reason for reason, is_active in clocks.throttle.items() if is_active}
    assert active == {"sw_power_cap", "hw_thermal_slowdown"}
    assert len(clocks.throttle) == 9
    assert clocks.performance_state == 2


def test_older_driver_calls_event_reasons_throttle_reasons(gpu: GpuUnderTest) -> None:
    """The older function is used; an unknown performance state is absent."""
    gpu.set(
        CurrentClocksEventReasons=0x1,
        nvmlDeviceGetCurrentClocksEventReasons="function_not_found",
        PerformanceState=32,
    )
    clocks = gpu.read(Clocks)
    assert clocks

    assert clocks.throttle["gpu_idle"]
    assert clocks.performance_state is None


def test_fans(gpu: GpuUnderTest) -> None:
    """Every fan has a speed; older drivers report a single one."""
    gpu.set(FanSpeed=30)
    assert Fans([0.3]) == gpu.read(Fans)
    gpu.set(NumFans=2, FanSpeed_v2="40 60")
    assert Fans([0.4, 0.6]) == gpu.read_later(Fans)


def test_pcie(gpu: GpuUnderTest) -> None:
    """The link as it is and as it could be; throughput in bytes per second by direction."""
    gpu.set(
        CurrPcieLinkGeneration=1,
        MaxPcieLinkGeneration=5,
        CurrPcieLinkWidth=8,
        MaxPcieLinkWidth=16,
        PcieReplayCounter=12,
        PcieThroughput="5 9",
    )

    assert Pcie(1, 5, 8, 16, 12) == gpu.read(Pcie)
    assert PcieThroughput(Traffic(rx=9000, tx=5000)) == gpu.read(PcieThroughput)


@pytest.fixture
def linked(gpu: GpuUnderTest) -> GpuUnderTest:
    """Three NVLinks, of which the second is down; replays and recoveries are counted."""
    gpu.set_fields({91: 3})
    gpu.set(
        **{
            "NvLinkState": "1 0 1",
            "NvLinkErrorCounter.0": "0 10 20",
            "NvLinkErrorCounter.1": "1 11 21",
        }
    )
    return gpu


LINK_ERRORS = {(0, "replay"): 0, (0, "recovery"): 1, (2, "replay"): 20, (2, "recovery"): 21}


def test_nvlink(linked: GpuUnderTest) -> None:
    """State of every link, errors of those that are up by counted kind, KiB become bytes."""
    linked.set_fields({"138.all": 7, "139.all": 8})
    up = {0: True, 1: False, 2: True}

    assert NvLink(up, LINK_ERRORS, Traffic(rx=8192, tx=7168)) == linked.read(NvLink)


def test_errors_of_a_link_that_goes_down_are_kept(linked: GpuUnderTest) -> None:
    """The sum over links must not fall when one of them has no counters any more."""
    before = linked.read(NvLink)
    linked.set(
        **{
            "NvLinkState": "1 0 0",
            "NvLinkErrorCounter.0": "100 - -",
            "NvLinkErrorCounter.1": "100 - -",
        }
    )
    down = linked.read_later(NvLink)
    linked.nvml.keep([])
    linked.identify()
    forgotten = linked.read(NvLink)

    assert before
    assert down
    assert forgotten
    assert before.errors == LINK_ERRORS
    first = {(0, "replay"): 100, (0, "recovery"): 100}
    assert {**LINK_ERRORS, **first} == down.errors
    assert first == forgotten.errors


def test_what_hardly_ever_changes_or_takes_long_is_read_once_a_minute(
    linked: GpuUnderTest,
) -> None:
    """A scrape within a minute makes no call for links, modes, energy, replays and BAR1."""
    linked.set(EccMode="1 0", NumFans=1, FanSpeed_v2="40 60", MigMode="0 0", PowerUsage=1000)
    linked.set(TotalEnergyConsumption=5000, PcieReplayCounter=1, BAR1MemoryInfo="9 3 6")
    kinds = (NvLink, Ecc, Fans, Mig, Power, Pcie, Bar1)
    before = [linked.read(kind) for kind in kinds]
    linked.set(NvLinkState="1 1 1", EccMode="0 0", NumFans=2)
    linked.set(TotalEnergyConsumption=7000, PcieReplayCounter=2, BAR1MemoryInfo="9 4 5")
    names = (
        "NvLinkState",
        "NvLinkErrorCounter",
        "EccMode",
        "NumFans",
        "MigMode",
        "TotalEnergyConsumption",
        "PcieReplayCounter",
        "BAR1MemoryInfo",
    )
    calls = [linked.node.calls(f"nvmlDeviceGet{name}") for name in names]
    linked.now += SELDOM_SECONDS - 1

    assert [linked.read(kind) for kind in kinds] == before
    assert [linked.node.calls(f"nvmlDeviceGet{name}") for name in names] == calls
    assert all(calls)
    linked.now += 1
    links, ecc, fans, mig, power, pcie, bar1 = (linked.read(kind) for kind in kinds)
    assert isinstance(links, NvLink)
    assert links.up == {0: True, 1: True, 2: True}
    assert [ecc, fans] == [Ecc(enabled=False), Fans([0.4, 0.6])]
    assert [mig, power, pcie] == [
        Mig(enabled=False, instances=[]),
        Power(watts=1.0, energy_joules=7.0),
        Pcie(replays=2),
    ]
    assert isinstance(bar1, Bar1)
    assert bar1 not in before


def test_nvlink_5_counts_bytes(linked: GpuUnderTest) -> None:
    """Where the older fields are gone the newer ones are read."""
    linked.set_fields({"202.all": 7, "204.all": 8})
    nvlink = linked.read(NvLink)
    assert nvlink

    assert Traffic(rx=8, tx=7) == nvlink.transferred


def test_links_are_counted_without_their_field(gpu: GpuUnderTest) -> None:
    """Older drivers have no field for the count: the first missing link ends the list."""
    gpu.set(NvLinkState="1 1")
    nvlink = gpu.read(NvLink)
    assert nvlink

    assert nvlink.up == {0: True, 1: True}


def test_ecc(gpu: GpuUnderTest) -> None:
    """Errors by kind and scope."""
    gpu.set(**{"EccMode": "1 0", "TotalEccErrors.0": "0 10", "TotalEccErrors.1": "1 11"})
    errors = {
        ("corrected", "volatile"): 0,
        ("corrected", "aggregate"): 1,
        ("uncorrected", "volatile"): 10,
        ("uncorrected", "aggregate"): 11,
    }

    assert Ecc(True, errors) == gpu.read(Ecc)


def test_remapped_rows(gpu: GpuUnderTest) -> None:
    """Ampere and newer remap rows."""
    gpu.set(RemappedRows="5 2 1 0")
    repairs = gpu.read(Repairs)
    assert repairs

    assert repairs.remapped_rows == {"correctable": 5, "uncorrectable": 2}
    assert (repairs.remap_pending, repairs.remap_failed) == (True, False)


def test_retired_pages(gpu: GpuUnderTest) -> None:
    """Older GPUs retire pages."""
    gpu.set_fields({29: 3, 30: 4, 31: 1})
    pages = {"multiple_single_bit": 3, "double_bit": 4}

    assert Repairs(retired_pages=pages, retirement_pending=True) == gpu.read(Repairs)


@pytest.mark.parametrize(
    ("number", "action"), [(0, "none"), (1, "gpu_reset"), (4, "drain_and_reset"), (99, None)]
)
def test_recovery_action(gpu: GpuUnderTest, number: int, action: str | None) -> None:
    """The action has NVML's name; an unknown number has none."""
    gpu.set_fields({230: number})
    repairs = gpu.read(Repairs)
    assert repairs

    assert action == repairs.recovery_action


def listed(gpu: GpuUnderTest) -> list[ProcessMemory] | None:
    """Read the processes of the GPU."""
    processes = gpu.read(Processes)
    return None if processes is None else list(processes.listed)


def test_processes_of_all_kinds_are_listed_once(
    gpu: GpuUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """A pid with a compute and a graphics context is one process; older drivers have version 2."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    gpu.set(
        ComputeRunningProcesses="7:5 8:-",
        GraphicsRunningProcesses="7:9 9:1",
        MPSComputeRunningProcesses="8:3",
        nvmlDeviceGetComputeRunningProcesses_v3="function_not_found",
    )

    assert [ProcessMemory(7, 9), ProcessMemory(8, 3), ProcessMemory(9, 1)] == listed(gpu)
    assert [message for message in caplog.messages if "RunningProcesses" in message] == []


def test_unavailable_bytes_are_unknown(gpu: GpuUnderTest) -> None:
    """NVML's "not available" never becomes 1.8e19 bytes."""
    gpu.set(ComputeRunningProcesses="7:-")

    assert [ProcessMemory(7, None)] == listed(gpu)


def test_unavailable_list_is_not_an_empty_one(gpu: GpuUnderTest) -> None:
    """Without permission for any list there are no processes, not zero processes."""
    for kind in ("Compute", "Graphics", "MPSCompute"):
        gpu.set(**{f"nvmlDeviceGet{kind}RunningProcesses_v3": "no_permission"})

    assert listed(gpu) is None


def utilization(gpu: GpuUnderTest) -> dict[int, ProcessUtilization]:
    """Read the utilization by pid."""
    processes = gpu.read(Processes)
    assert processes
    return dict(processes.utilization)


def test_process_utilization_is_the_newest_of_each_process(gpu: GpuUnderTest) -> None:
    """Samples from before the window and ratios above 1 are left out."""
    recent, earlier, old = (int((gpu.now - age) * 1e6) for age in (1, 5, 60))
    rows = [f"7:{recent}:80:40", f"7:{earlier}:10:10", f"8:{old}:50:50", f"9:{recent}:4000000:30"]
    gpu.set(ComputeRunningProcesses="7:1", ProcessUtilization=" ".join(rows))

    assert {7: ProcessUtilization(0.8, 0.4), 9: ProcessUtilization(None, 0.3)} == utilization(gpu)


@pytest.mark.parametrize("code", ["not_found", "not_supported"])
def test_no_samples_are_no_utilization(gpu: GpuUnderTest, code: str) -> None:
    """A GPU without samples is up and has processes."""
    gpu.set(ComputeRunningProcesses="7:1", ProcessUtilization=code)

    assert utilization(gpu) == {}


def test_an_idle_gpu_is_not_logged(gpu: GpuUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    """That no process used the GPU lately is not a value that NVML does not return."""
    caplog.set_level(logging.INFO)
    gpu.set(ComputeRunningProcesses="7:1", ProcessUtilization="not_found")

    assert utilization(gpu) == {}
    gpu.nvml.end_reading()
    assert [message for message in caplog.messages if "ProcessUtilization" in message] == []


def test_utilization_of_processes_is_not_asked_for_without_processes(gpu: GpuUnderTest) -> None:
    """The call, which takes 2 to 3 ms on a real GPU, is left out on an idle one."""
    gpu.set(ComputeRunningProcesses="", ProcessUtilization=f"7:{int(gpu.now * 1e6)}:80:40")

    assert utilization(gpu) == {}
    assert gpu.node.calls("nvmlDeviceGetProcessUtilization") == 0


GPM = {2: 90, 3: 45, 5: 60, 10: 30, 20: 1, 21: 2, 60: 3, 61: 4}
MEANS = Gpm(0.9, 0.45, 0.6, 0.3, Traffic(3 << 20, 4 << 20), Traffic(2 << 20, 1 << 20))


@pytest.fixture
def hopper(gpu: GpuUnderTest) -> GpuUnderTest:
    """A GPU with GPM that was never read."""
    gpu.set(GpmQueryDeviceSupport=1, **{f"Gpm.{metric}": value for metric, value in GPM.items()})
    return gpu


def means_after(gpu: GpuUnderTest, seconds: float) -> Gpm | None:
    """Read the means some seconds later."""
    gpu.now += seconds
    return gpu.read(Gpm)


def samples_in_use(gpu: GpuUnderTest) -> int:
    """Return how many samples are allocated and not freed."""
    return gpu.node.calls("nvmlGpmSampleAlloc") - gpu.node.calls("nvmlGpmSampleFree")


def windows(gpu: GpuUnderTest) -> list[tuple[int, int]]:
    """Return the windows that were evaluated, from the first to the last sample."""
    lines = [line.split() for line in gpu.node.log.read_text().splitlines() if " and " in line]
    first = int(lines[0][1]) if lines else 0
    return [(int(line[1]) - first, int(line[3]) - first) for line in lines]


def test_gpm_means_are_in_base_units(hopper: GpuUnderTest) -> None:
    """The first reading has no window; percentages become ratios, and MiB/s bytes per second."""
    assert [means_after(hopper, 0), means_after(hopper, 15)] == [None, MEANS]


def test_gpm_windows_follow_one_another(hopper: GpuUnderTest) -> None:
    """Each window begins where the last one ended, and only one sample is kept."""
    for _ in range(4):
        means_after(hopper, 15)

    assert windows(hopper) == [(0, 1), (1, 2), (2, 3)]
    assert samples_in_use(hopper) == 1


def test_second_prometheus_gets_the_same_means(hopper: GpuUnderTest) -> None:
    """Two scrapes within a second see the same window, not a gap."""
    means_after(hopper, 0)
    means_after(hopper, 15)

    assert means_after(hopper, 0.5) == MEANS
    assert len(windows(hopper)) == 1


def test_long_pause_is_no_window(hopper: GpuUnderTest) -> None:
    """After ten minutes without a scrape the mean would not describe the present."""
    means_after(hopper, 0)

    assert [
        means_after(hopper, MAX_WINDOW_SECONDS + 1),
        means_after(hopper, 15),
    ] == [None, MEANS]


def test_single_gpm_metrics_can_be_missing(hopper: GpuUnderTest) -> None:
    """A metric that is unavailable or not a number is absent; the others are there."""
    hopper.set(**{"Gpm.60": "not_supported", "Gpm.61": "not_supported", "Gpm.5": "nan"})
    means_after(hopper, 0)
    means = means_after(hopper, 15)
    assert means

    assert (0.9, None, Traffic()) == (means.sm_active, means.tensor_active, means.nvlink)


@pytest.mark.parametrize(
    "function",
    ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"],
)
def test_gpu_without_gpm(hopper: GpuUnderTest, function: str) -> None:
    """GPUs before Hopper and older drivers have no means, and at most one sample is allocated."""
    hopper.set(**{function: "not_supported"})

    assert [means_after(hopper, 0), means_after(hopper, 15)] == [None, None]
    assert samples_in_use(hopper) <= 1


def test_driver_without_gpm_samples(hopper: GpuUnderTest) -> None:
    """If no GPM sample can be allocated, no averages are exported."""
    hopper.node.change("node", nvmlGpmSampleAlloc="not_supported")

    assert [means_after(hopper, 0), means_after(hopper, 15)] == [None, None]


def test_failed_evaluation_frees_its_sample(hopper: GpuUnderTest) -> None:
    """A GPU that is lost between sample and evaluation leaves one sample, not one per scrape."""
    means_after(hopper, 0)
    hopper.set(nvmlGpmMetricsGet="gpu_is_lost")
    for _ in range(3):
        with pytest.raises(Exception, match="code 15"):
            means_after(hopper, 15)

    assert samples_in_use(hopper) == 1


def test_gpu_without_gpm_is_not_asked_again(hopper: GpuUnderTest) -> None:
    """Support does not change while NVML is open."""
    hopper.set(GpmQueryDeviceSupport=0)
    for _ in range(3):
        means_after(hopper, 15)

    assert hopper.node.calls("nvmlGpmQueryDeviceSupport") == 1
    assert hopper.node.calls("nvmlGpmSampleAlloc") == 0


def test_gpm_samples_are_freed(hopper: GpuUnderTest) -> None:
    """When a GPU is gone and before NVML is shut down, no sample is kept."""
    means_after(hopper, 0)
    hopper.nvml.keep([])
    after_keep = samples_in_use(hopper)
    hopper.identify()
    begins_anew = means_after(hopper, 15)
    hopper.nvml.close()

    assert (after_keep, begins_anew, samples_in_use(hopper)) == (0, None, 0)


def test_gpm_sample_is_freed_once(hopper: GpuUnderTest) -> None:
    """A GPU that goes away during a hung call leaves no sample; none is freed twice."""
    means_after(hopper, 0)
    hopper.set(nvmlGpmMetricsGet="hang")
    hopper.now += 15
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(hopper.read, Gpm)
        until(lambda: hopper.node.calls("nvmlGpmMetricsGet"))
        hopper.nvml.keep([])
        hopper.set(nvmlGpmMetricsGet="success")

        assert late.result(60) is None
    assert samples_in_use(hopper) == 0
