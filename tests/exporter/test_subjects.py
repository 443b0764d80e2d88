"""Each value of a GPU, read through nvidia-ml-py: in base units, absent where unavailable."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from support.fake_nvml import FakeNode
from support.waiting import until

from torchmem.exporter.driver import PyNvml
from torchmem.exporter.gpus import GpuIdentity, GpuValue, Versions
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.gpm import MAX_WINDOW_SECONDS, Gpm
from torchmem.exporter.subjects.memory import Bar1, MemoryInfo, UnifiedMemory
from torchmem.exporter.subjects.mig import Mig
from torchmem.exporter.subjects.nvlink import NvLink
from torchmem.exporter.subjects.pcie import Pcie, PcieThroughput, Traffic
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes, ProcessMemory, ProcessUtilization
from torchmem.exporter.subjects.temperature import Fans, Temperatures
from torchmem.exporter.subjects.utilization import Utilization

V = TypeVar("V", bound=GpuValue)
UUID = "GPU-a"
GIB = 1 << 30


class Card:
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


@pytest.fixture
def card(tmp_path: Path) -> Card:
    """A GPU on which nothing is available."""
    return Card(tmp_path / "node")


def test_unavailable_values_are_absent(card: Card) -> None:
    """On a card that supports nothing, no value is 0."""
    assert [Utilization(), Power(), Clocks({}, {}), Pcie(), Ecc(), NvLink(), Fans([])] == [
        card.read(Utilization),
        card.read(Power),
        without_unknown(card.read(Clocks)),
        card.read(Pcie),
        card.read(Ecc),
        card.read(NvLink),
        card.read(Fans),
    ]
    assert Repairs(retired_pages={"multiple_single_bit": None, "double_bit": None}) == card.read(
        Repairs
    )
    assert PcieThroughput(Traffic()) == card.read(PcieThroughput)
    assert [None] * 5 == [card.read(kind) for kind in (MemoryInfo, Bar1, Mig, Gpm, Processes)]


def without_unknown(clocks: Clocks | None) -> Clocks:
    """Leave out the domains without a value."""
    assert clocks
    hertz = {domain: value for domain, value in clocks.hertz.items() if value is not None}
    max_hertz = {domain: value for domain, value in clocks.max_hertz.items() if value is not None}
    return Clocks(hertz, max_hertz, clocks.throttle, clocks.performance_state)


def test_versions(card: Card) -> None:
    """CUDA's number is written as people write it."""
    card.node.change(
        "node",
        SystemGetDriverVersion="580.65.06",
        SystemGetNVMLVersion="13.580.65.06",
        SystemGetCudaDriverVersion=12_080,
    )

    assert Versions("580.65.06", "13.580.65.06", "12.8") == card.nvml.versions()


def test_identity(card: Card) -> None:
    """The identity is complete; modes are words, and an unknown mode is absent."""
    card.node.change("node", SystemGetDriverVersion="580.65.06")
    card.set(
        Name="NVIDIA H100 80GB HBM3",
        PciInfo="00000000:18:00.0",
        VbiosVersion="96.00.A5.00.01",
        ComputeMode=3,
        PersistenceMode=7,
    )

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
        == card.identify()
    )


def test_memory(card: Card) -> None:
    """Bytes, with what the driver reserves."""
    card.set(MemoryInfo=f"{80 * GIB} {GIB} {77 * GIB} {2 * GIB}")

    assert MemoryInfo(80 * GIB, 2 * GIB, 77 * GIB, GIB) == card.read(MemoryInfo)


@pytest.mark.parametrize("code", ["function_not_found", "argument_version_mismatch"])
def test_older_driver_reports_no_reserved_memory(
    card: Card, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """Version 1 of the function is used: `reserved` is absent, and nothing is logged."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    card.set(MemoryInfo="80 1 77 2", nvmlDeviceGetMemoryInfo_v2=code)

    assert MemoryInfo(80, 3, 77, None) == card.read(MemoryInfo)
    assert [] == caplog.messages


def test_value_that_no_version_returns_is_logged(
    card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the older function fails too, this is logged once."""
    caplog.set_level(logging.INFO)
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        card.set(**{function: "function_not_found"})
    caplog.clear()

    assert [None, None] == [card.read(MemoryInfo), card.read(MemoryInfo)]
    assert ["nvmlDeviceGetMemoryInfo returns no value: NVML return code 13"] == caplog.messages


@pytest.mark.parametrize(
    ("memory", "unified"),
    [
        ("80 1 77 2", UnifiedMemory(False)),
        ("not_supported", UnifiedMemory(True)),
        ("no_permission", None),
    ],
)
def test_unified_memory(card: Card, memory: str, unified: UnifiedMemory | None) -> None:
    """Unsupported memory is shared with the CPU; without permission it is unknown."""
    card.set(MemoryInfo=memory)

    assert unified == card.read(UnifiedMemory)


def test_bar1(card: Card) -> None:
    """Bytes."""
    card.set(BAR1MemoryInfo=f"{128 * GIB} {127 * GIB} {GIB}")

    assert Bar1(128 * GIB, GIB) == card.read(Bar1)


def test_utilization(card: Card) -> None:
    """Percentages become ratios; the sampling period is dropped."""
    card.set(
        UtilizationRates="97 41",
        EncoderUtilization="10 167000",
        DecoderUtilization="20 167000",
        JpgUtilization="30 167000",
        OfaUtilization="40 167000",
    )

    assert Utilization(0.97, 0.41, 0.1, 0.2, 0.3, 0.4) == card.read(Utilization)


def test_power(card: Card) -> None:
    """Milliwatts become watts, millijoules joules."""
    card.set(
        PowerUsage=412_500,
        EnforcedPowerLimit=650_000,
        PowerManagementLimitConstraints="200000 700000",
        TotalEnergyConsumption=5_000_000_000,
    )

    assert Power(412.5, 650.0, 700.0, 5_000_000.0) == card.read(Power)


@pytest.mark.parametrize(
    ("milliwatts", "watts"),
    [(664_074, 664.074), (700_001, 700.001), (1, 0.001), ((1 << 32) - 1, None)],
)
def test_units_add_no_noise(card: Card, milliwatts: int, watts: float | None) -> None:
    """A value has no digits from the conversion, and NVML's "not available" is not a number."""
    card.set(PowerUsage=milliwatts)

    assert Power(watts) == card.read(Power)


def test_temperatures(card: Card) -> None:
    """Sensors and thresholds by name; a threshold that the GPU does not have is unknown."""
    card.set(Temperature=61, TemperatureThreshold="92 89 - 87")
    card.set_fields({82: 70})
    thresholds = {"shutdown": 92, "slowdown": 89, "memory_max": None, "gpu_max": 87}

    assert Temperatures({"gpu": 61, "memory": 70}, thresholds) == card.read(Temperatures)


def test_driver_without_field_values(card: Card) -> None:
    """The sensor that is read as a field value is unknown, the other one is there."""
    card.set(Temperature=61, nvmlDeviceGetFieldValues="function_not_found")
    temperatures = card.read(Temperatures)
    assert temperatures

    assert {"gpu": 61, "memory": None} == temperatures.sensors


def test_older_driver_has_the_older_temperature_function(card: Card) -> None:
    """nvmlDeviceGetTemperature is used where nvmlDeviceGetTemperatureV is missing."""
    card.set(Temperature=61, nvmlDeviceGetTemperatureV="function_not_found")
    temperatures = card.read(Temperatures)
    assert temperatures

    assert 61 == temperatures.sensors["gpu"]


def test_clocks(card: Card) -> None:
    """Megahertz become hertz; every reason is reported, active or not."""
    card.set(
        ClockInfo="1980 1755 2619 0xffffffff",
        MaxClockInfo="1980 1980 2619 1545",
        CurrentClocksEventReasons=0x4 | 0x40,
        PerformanceState=2,
    )
    clocks = card.read(Clocks)
    assert clocks

    assert {"graphics": 1.98e9, "sm": 1.755e9, "memory": 2.619e9, "video": None} == clocks.hertz
    assert 1.545e9 == clocks.max_hertz["video"]
    active = {reason for reason, is_active in clocks.throttle.items() if is_active}
    assert {"sw_power_cap", "hw_thermal_slowdown"} == active
    assert 9 == len(clocks.throttle)
    assert 2 == clocks.performance_state


def test_older_driver_calls_event_reasons_throttle_reasons(card: Card) -> None:
    """The older function is used; an unknown performance state is absent."""
    card.set(
        CurrentClocksEventReasons=0x1,
        nvmlDeviceGetCurrentClocksEventReasons="function_not_found",
        PerformanceState=32,
    )
    clocks = card.read(Clocks)
    assert clocks

    assert clocks.throttle["gpu_idle"]
    assert clocks.performance_state is None


def test_fans(card: Card) -> None:
    """Every fan has a speed; older drivers report a single one."""
    card.set(FanSpeed=30)
    assert Fans([0.3]) == card.read(Fans)
    card.set(NumFans=2, FanSpeed_v2="40 60")
    assert Fans([0.4, 0.6]) == card.read(Fans)


def test_pcie(card: Card) -> None:
    """The link as it is and as it could be; throughput in bytes per second by direction."""
    card.set(
        CurrPcieLinkGeneration=1,
        MaxPcieLinkGeneration=5,
        CurrPcieLinkWidth=8,
        MaxPcieLinkWidth=16,
        PcieReplayCounter=12,
        PcieThroughput="5 9",
    )

    assert Pcie(1, 5, 8, 16, 12) == card.read(Pcie)
    assert PcieThroughput(Traffic(rx=9000, tx=5000)) == card.read(PcieThroughput)


@pytest.fixture
def linked(card: Card) -> Card:
    """Three NVLinks, of which the second is down; replays and recoveries are counted."""
    card.set_fields({91: 3})
    card.set(
        **{
            "NvLinkState": "1 0 1",
            "NvLinkErrorCounter.0": "0 10 20",
            "NvLinkErrorCounter.1": "1 11 21",
        }
    )
    return card


LINK_ERRORS = {(0, "replay"): 0, (0, "recovery"): 1, (2, "replay"): 20, (2, "recovery"): 21}


def test_nvlink(linked: Card) -> None:
    """State of every link, errors of those that are up by counted kind, KiB become bytes."""
    linked.set_fields({"138.all": 7, "139.all": 8})
    up = {0: True, 1: False, 2: True}

    assert NvLink(up, LINK_ERRORS, Traffic(rx=8192, tx=7168)) == linked.read(NvLink)


def test_errors_of_a_link_that_goes_down_are_kept(linked: Card) -> None:
    """The sum over links must not fall when one of them has no counters any more."""
    before = linked.read(NvLink)
    linked.set(
        **{
            "NvLinkState": "1 0 0",
            "NvLinkErrorCounter.0": "100 - -",
            "NvLinkErrorCounter.1": "100 - -",
        }
    )
    down = linked.read(NvLink)
    linked.nvml.keep([])
    linked.identify()
    forgotten = linked.read(NvLink)

    assert before
    assert down
    assert forgotten
    assert LINK_ERRORS == before.errors
    first = {(0, "replay"): 100, (0, "recovery"): 100}
    assert {**LINK_ERRORS, **first} == down.errors
    assert first == forgotten.errors


def test_nvlink_5_counts_bytes(linked: Card) -> None:
    """Where the older fields are gone the newer ones are read."""
    linked.set_fields({"202.all": 7, "204.all": 8})
    nvlink = linked.read(NvLink)
    assert nvlink

    assert Traffic(rx=8, tx=7) == nvlink.transferred


def test_links_are_counted_without_their_field(card: Card) -> None:
    """Older drivers have no field for the count: the first missing link ends the list."""
    card.set(NvLinkState="1 1")
    nvlink = card.read(NvLink)
    assert nvlink

    assert {0: True, 1: True} == nvlink.up


def test_ecc(card: Card) -> None:
    """Errors by kind and scope."""
    card.set(**{"EccMode": "1 0", "TotalEccErrors.0": "0 10", "TotalEccErrors.1": "1 11"})
    errors = {
        ("corrected", "volatile"): 0,
        ("corrected", "aggregate"): 1,
        ("uncorrected", "volatile"): 10,
        ("uncorrected", "aggregate"): 11,
    }

    assert Ecc(True, errors) == card.read(Ecc)


def test_remapped_rows(card: Card) -> None:
    """Ampere and newer remap rows."""
    card.set(RemappedRows="5 2 1 0")
    repairs = card.read(Repairs)
    assert repairs

    assert {"correctable": 5, "uncorrectable": 2} == repairs.remapped_rows
    assert (True, False) == (repairs.remap_pending, repairs.remap_failed)


def test_retired_pages(card: Card) -> None:
    """Older GPUs retire pages."""
    card.set_fields({29: 3, 30: 4, 31: 1})
    pages = {"multiple_single_bit": 3, "double_bit": 4}

    assert Repairs(retired_pages=pages, retirement_pending=True) == card.read(Repairs)


@pytest.mark.parametrize(
    ("number", "action"), [(0, "none"), (1, "gpu_reset"), (4, "drain_and_reset"), (99, None)]
)
def test_recovery_action(card: Card, number: int, action: str | None) -> None:
    """The action has NVML's name; an unknown number has none."""
    card.set_fields({230: number})
    repairs = card.read(Repairs)
    assert repairs

    assert action == repairs.recovery_action


def listed(card: Card) -> list[ProcessMemory] | None:
    """Read the processes of the GPU."""
    processes = card.read(Processes)
    return None if processes is None else list(processes.listed)


def test_processes_of_all_kinds_are_listed_once(
    card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    """A pid with a compute and a graphics context is one process; older drivers have version 2."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    card.set(
        ComputeRunningProcesses="7:5 8:-",
        GraphicsRunningProcesses="7:9 9:1",
        MPSComputeRunningProcesses="8:3",
        nvmlDeviceGetComputeRunningProcesses_v3="function_not_found",
    )

    assert [ProcessMemory(7, 9), ProcessMemory(8, 3), ProcessMemory(9, 1)] == listed(card)
    assert [] == [message for message in caplog.messages if "RunningProcesses" in message]


def test_unavailable_bytes_are_unknown(card: Card) -> None:
    """NVML's "not available" never becomes 1.8e19 bytes."""
    card.set(ComputeRunningProcesses="7:-")

    assert [ProcessMemory(7, None)] == listed(card)


def test_unavailable_list_is_not_an_empty_one(card: Card) -> None:
    """Without permission for any list there are no processes, not zero processes."""
    for kind in ("Compute", "Graphics", "MPSCompute"):
        card.set(**{f"nvmlDeviceGet{kind}RunningProcesses_v3": "no_permission"})

    assert listed(card) is None


def utilization(card: Card) -> dict[int, ProcessUtilization]:
    """Read the utilization by pid."""
    processes = card.read(Processes)
    assert processes
    return dict(processes.utilization)


def test_process_utilization_is_the_newest_of_each_process(card: Card) -> None:
    """Samples from before the window and ratios above 1 are left out."""
    recent, earlier, old = (int((card.now - age) * 1e6) for age in (1, 5, 60))
    rows = [f"7:{recent}:80:40", f"7:{earlier}:10:10", f"8:{old}:50:50", f"9:{recent}:4000000:30"]
    card.set(ComputeRunningProcesses="7:1", ProcessUtilization=" ".join(rows))

    assert {7: ProcessUtilization(0.8, 0.4), 9: ProcessUtilization(None, 0.3)} == utilization(card)


@pytest.mark.parametrize("code", ["not_found", "not_supported"])
def test_no_samples_are_no_utilization(card: Card, code: str) -> None:
    """A GPU without samples is up and has processes."""
    card.set(ComputeRunningProcesses="7:1", ProcessUtilization=code)

    assert {} == utilization(card)


GPM = {2: 90, 3: 45, 5: 60, 10: 30, 20: 1, 21: 2, 60: 3, 61: 4}
MEANS = Gpm(0.9, 0.45, 0.6, 0.3, Traffic(3 << 20, 4 << 20), Traffic(2 << 20, 1 << 20))


@pytest.fixture
def hopper(card: Card) -> Card:
    """A GPU with GPM that was never read."""
    card.set(GpmQueryDeviceSupport=1, **{f"Gpm.{metric}": value for metric, value in GPM.items()})
    return card


def means_after(card: Card, seconds: float) -> Gpm | None:
    """Read the means some seconds later."""
    card.now += seconds
    return card.read(Gpm)


def samples_in_use(card: Card) -> int:
    """Return how many samples are allocated and not freed."""
    return card.node.calls("nvmlGpmSampleAlloc") - card.node.calls("nvmlGpmSampleFree")


def windows(card: Card) -> list[tuple[int, int]]:
    """Return the windows that were evaluated, from the first to the last sample."""
    lines = [line.split() for line in card.node.log.read_text().splitlines() if " and " in line]
    first = int(lines[0][1]) if lines else 0
    return [(int(line[1]) - first, int(line[3]) - first) for line in lines]


def test_gpm_means_are_in_base_units(hopper: Card) -> None:
    """The first reading has no window; percentages become ratios, and MiB/s bytes per second."""
    assert [None, MEANS] == [means_after(hopper, 0), means_after(hopper, 15)]


def test_gpm_windows_follow_one_another(hopper: Card) -> None:
    """Each window begins where the last one ended, and only one sample is kept."""
    for _ in range(4):
        means_after(hopper, 15)

    assert [(0, 1), (1, 2), (2, 3)] == windows(hopper)
    assert 1 == samples_in_use(hopper)


def test_second_prometheus_gets_the_same_means(hopper: Card) -> None:
    """Two scrapes within a second see the same window, not a gap."""
    means_after(hopper, 0)
    means_after(hopper, 15)

    assert MEANS == means_after(hopper, 0.5)
    assert 1 == len(windows(hopper))


def test_long_pause_is_no_window(hopper: Card) -> None:
    """After ten minutes without a scrape the mean would not describe the present."""
    means_after(hopper, 0)

    assert [None, MEANS] == [
        means_after(hopper, MAX_WINDOW_SECONDS + 1),
        means_after(hopper, 15),
    ]


def test_single_gpm_metrics_can_be_missing(hopper: Card) -> None:
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
def test_gpu_without_gpm(hopper: Card, function: str) -> None:
    """GPUs before Hopper and older drivers have no means, and at most one sample is allocated."""
    hopper.set(**{function: "not_supported"})

    assert [None, None] == [means_after(hopper, 0), means_after(hopper, 15)]
    assert samples_in_use(hopper) <= 1


def test_driver_without_gpm_samples(hopper: Card) -> None:
    """Where no sample can be allocated there are no means."""
    hopper.node.change("node", nvmlGpmSampleAlloc="not_supported")

    assert [None, None] == [means_after(hopper, 0), means_after(hopper, 15)]


def test_failed_evaluation_frees_its_sample(hopper: Card) -> None:
    """A GPU that is lost between sample and evaluation leaves one sample, not one per scrape."""
    means_after(hopper, 0)
    hopper.set(nvmlGpmMetricsGet="gpu_is_lost")
    for _ in range(3):
        with pytest.raises(Exception, match="code 15"):
            means_after(hopper, 15)

    assert 1 == samples_in_use(hopper)


def test_gpu_without_gpm_is_not_asked_again(hopper: Card) -> None:
    """Support does not change while NVML is open."""
    hopper.set(GpmQueryDeviceSupport=0)
    for _ in range(3):
        means_after(hopper, 15)

    assert 1 == hopper.node.calls("nvmlGpmQueryDeviceSupport")
    assert 0 == hopper.node.calls("nvmlGpmSampleAlloc")


def test_gpm_samples_are_freed(hopper: Card) -> None:
    """When a GPU is gone and before NVML is shut down, no sample is kept."""
    means_after(hopper, 0)
    hopper.nvml.keep([])
    after_keep = samples_in_use(hopper)
    hopper.identify()
    begins_anew = means_after(hopper, 15)
    hopper.nvml.close()

    assert (0, None, 0) == (after_keep, begins_anew, samples_in_use(hopper))


def test_gpm_sample_is_freed_once(hopper: Card) -> None:
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
    assert 0 == samples_in_use(hopper)
