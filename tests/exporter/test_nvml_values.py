"""Each value through the Python binding: in base units, under the right name, absent when it is not given."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from support.exposition import scrape
from support.nvml_binding import ALL_LINKS, GIB, FakeBinding, uuid_of

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import NvmlCallError
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.nvml.binding import SYMBOLS, Door
from torchmem.exporter.run_directory import RunDirectory
from torchmem.exporter.values import (
    Bar1,
    Clocks,
    Ecc,
    NvLink,
    Pcie,
    Power,
    ProcessUtilization,
    Repairs,
    Temperatures,
    Transfer,
    Utilization,
    Versions,
)

UUID = uuid_of(0)
NOT_SUPPORTED, NOT_FOUND, UNKNOWN = 3, 6, 999


@pytest.fixture
def binding() -> FakeBinding:
    """One GPU on which all that is in the tests is supported."""
    return FakeBinding(1)


@pytest.fixture
def nvml(binding: FakeBinding) -> PyNvml:
    """NVML over that binding, open, its GPU listed."""
    nvml = PyNvml(binding)
    nvml.open()
    for index in range(nvml.count()):
        nvml.gpu(index)
    return nvml


def test_versions(binding: FakeBinding, nvml: PyNvml) -> None:
    """CUDA's number is written as people write it."""
    binding.answers["nvmlSystemGetNVMLVersion"] = lambda: b"13.580.65.06"
    binding.answers["nvmlSystemGetCudaDriverVersion_v2"] = lambda: 12_080

    assert Versions("580.65.06", "13.580.65.06", "12.8") == nvml.versions()


def test_setup_of_the_gpu(binding: FakeBinding, nvml: PyNvml) -> None:
    """Modes are words; a mode that nobody knows yet is absent."""
    binding.answers["nvmlDeviceGetVbiosVersion"] = lambda gpu: "96.00.A5.00.01"
    binding.answers["nvmlDeviceGetComputeMode"] = lambda gpu: 3
    binding.answers["nvmlDeviceGetPersistenceMode"] = lambda gpu: 7
    gpu = nvml.gpu(0)

    assert ("96.00.A5.00.01", "exclusive_process", None) == (
        getattr(gpu, "vbios_version", ""),
        getattr(gpu, "compute_mode", ""),
        getattr(gpu, "persistence_mode", ""),
    )


@pytest.mark.parametrize(("code", "expected"), [(None, False), (NOT_SUPPORTED, True), (4, None)])
def test_unified_memory(
    binding: FakeBinding, nvml: PyNvml, code: int | None, expected: bool | None
) -> None:
    """Memory that NVML does not support is shared; memory that it may not tell is unknown."""
    if code is not None:
        binding.fail("nvmlDeviceGetMemoryInfo", code)

    assert expected is nvml.unified_memory(UUID)
    assert (nvml.memory(UUID) is None) == (code is not None)


def test_bar1(binding: FakeBinding, nvml: PyNvml) -> None:
    """Bytes."""
    binding.answers["nvmlDeviceGetBAR1MemoryInfo"] = lambda gpu: SimpleNamespace(
        bar1Total=128 * GIB, bar1Used=GIB
    )

    assert Bar1(128 * GIB, GIB) == nvml.bar1(UUID)


def test_media_engines(binding: FakeBinding, nvml: PyNvml) -> None:
    """Percent become ratios; the sampling period is dropped."""
    binding.answers |= {
        "nvmlDeviceGetEncoderUtilization": lambda gpu: [10, 167_000],
        "nvmlDeviceGetDecoderUtilization": lambda gpu: [20, 167_000],
        "nvmlDeviceGetJpgUtilization": lambda gpu: [30, 167_000],
        "nvmlDeviceGetOfaUtilization": lambda gpu: [40, 167_000],
    }

    assert Utilization(0.97, 0.41, 0.1, 0.2, 0.3, 0.4) == nvml.utilization(UUID)


def test_power(binding: FakeBinding, nvml: PyNvml) -> None:
    """Milliwatts become watts, millijoules joules."""
    binding.answers |= {
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 650_000,
        "nvmlDeviceGetPowerManagementLimitConstraints": lambda gpu: [200_000, 700_000],
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 5_000_000_000,
    }

    assert Power(412.5, 650.0, 700.0, 5_000_000.0) == nvml.power(UUID)


def test_temperatures(binding: FakeBinding, nvml: PyNvml) -> None:
    """Thresholds by name; one that the GPU does not have is absent."""
    limits = {0: 92, 1: 89, 3: 87}

    def threshold(gpu: int, number: int) -> int:
        if number not in limits:
            raise binding.NVMLError(NOT_SUPPORTED)
        return limits[number]

    binding.answers["nvmlDeviceGetTemperatureThreshold"] = threshold
    expected = Temperatures(
        {"gpu": 61, "memory": 70}, {"shutdown": 92, "slowdown": 89, "gpu_max": 87}
    )

    assert expected == nvml.temperatures(UUID)


def test_clocks(binding: FakeBinding, nvml: PyNvml) -> None:
    """Megahertz become hertz; every reason is told, those that hold and those that do not."""
    binding.answers |= {
        "nvmlDeviceGetClockInfo": lambda gpu, domain: [1980, 1755, 2619, (1 << 32) - 1][domain],
        "nvmlDeviceGetMaxClockInfo": lambda gpu, domain: [1980, 1980, 2619, 1545][domain],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x4 | 0x40,
        "nvmlDeviceGetPerformanceState": lambda gpu: 2,
    }
    clocks = nvml.clocks(UUID)

    assert {"graphics": 1.98e9, "sm": 1.755e9, "memory": 2.619e9} == clocks.hertz
    assert {
        "graphics": 1.98e9,
        "sm": 1.98e9,
        "memory": 2.619e9,
        "video": 1.545e9,
    } == clocks.max_hertz
    assert {"sw_power_cap", "hw_thermal_slowdown"} == {
        reason for reason, holds in clocks.throttle.items() if holds
    }
    assert 9 == len(clocks.throttle)
    assert 2 == clocks.performance_state


def test_older_driver_has_the_older_name_of_event_reasons(
    binding: FakeBinding, nvml: PyNvml
) -> None:
    """Clocks event reasons were called throttle reasons; an unknown performance state is absent."""
    binding.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = lambda gpu: 0x1
    binding.answers["nvmlDeviceGetPerformanceState"] = lambda gpu: 32
    clocks = nvml.clocks(UUID)

    assert clocks.throttle["gpu_idle"]
    assert clocks.performance_state is None


def test_fans(binding: FakeBinding, nvml: PyNvml) -> None:
    """Every fan has a speed; a card without fans none; older drivers tell of one."""
    assert [] == nvml.fans(UUID)
    binding.answers["nvmlDeviceGetFanSpeed"] = lambda gpu: 30
    assert [0.3] == nvml.fans(UUID)
    binding.answers["nvmlDeviceGetNumFans"] = lambda gpu: 2
    binding.answers["nvmlDeviceGetFanSpeed_v2"] = lambda gpu, fan: [40, 60][fan]
    assert [0.4, 0.6] == nvml.fans(UUID)


def test_pcie(binding: FakeBinding, nvml: PyNvml) -> None:
    """What the link is and what it could be; throughput in bytes per second by direction."""
    binding.answers |= {
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
        "nvmlDeviceGetPcieReplayCounter": lambda gpu: 12,
        "nvmlDeviceGetPcieThroughput": lambda gpu, counter: [5, 9][counter],
    }

    assert Pcie(1, 5, 8, 16, 12) == nvml.pcie(UUID)
    assert Transfer(rx=9000, tx=5000) == nvml.pcie_throughput(UUID)


@pytest.fixture
def linked(binding: FakeBinding) -> FakeBinding:
    """Three NVLinks, of which the second is down; replays and recoveries are counted."""

    def errors(gpu: int, link: int, kind: int) -> int:
        if kind > 1:
            raise binding.NVMLError(NOT_SUPPORTED)
        return 10 * link + kind

    binding.fields[91] = 3
    binding.answers["nvmlDeviceGetNvLinkState"] = lambda gpu, link: int(link != 1)
    binding.answers["nvmlDeviceGetNvLinkErrorCounter"] = errors
    return binding


def test_nvlink(linked: FakeBinding, nvml: PyNvml) -> None:
    """State of every link, errors of those that are up by the kinds that are counted, KiB become bytes."""
    linked.fields |= {(138, ALL_LINKS): 7, (139, ALL_LINKS): 8}
    errors = {(0, "replay"): 0, (0, "recovery"): 1, (2, "replay"): 20, (2, "recovery"): 21}

    assert NvLink({0: True, 1: False, 2: True}, errors, Transfer(rx=8192, tx=7168)) == nvml.nvlink(
        UUID
    )


def test_errors_of_a_link_that_goes_down_stay(linked: FakeBinding, nvml: PyNvml) -> None:
    """The sum over links must not fall when one of them can no longer be asked, and goes on when it can."""
    before = nvml.nvlink(UUID).errors
    linked.answers["nvmlDeviceGetNvLinkState"] = lambda gpu, link: int(link == 0)
    linked.answers["nvmlDeviceGetNvLinkErrorCounter"] = lambda gpu, link, kind: 100
    down = nvml.nvlink(UUID).errors
    nvml.keep([])
    for index in range(nvml.count()):
        nvml.gpu(index)

    assert {(0, "replay"): 0, (0, "recovery"): 1, (2, "replay"): 20, (2, "recovery"): 21} == before
    assert {link: errors for link, errors in before.items() if link[0] == 2}.items() <= down.items()
    assert {100} == {errors for (link, _), errors in down.items() if link == 0}
    assert {0} == {link for link, _ in nvml.nvlink(UUID).errors}


def test_nvlink_5_counts_bytes(linked: FakeBinding, nvml: PyNvml) -> None:
    """Where the older fields are gone the newer ones answer."""
    linked.fields |= {(202, ALL_LINKS): 7, (204, ALL_LINKS): 8}

    assert Transfer(rx=8, tx=7) == nvml.nvlink(UUID).transferred


def test_links_are_counted_by_asking_when_the_count_is_not_given(
    linked: FakeBinding, nvml: PyNvml
) -> None:
    """An older driver has no field for the count: the first link that does not exist ends the list."""

    def state(gpu: int, link: int) -> int:
        if link >= 2:
            raise linked.NVMLError(2)
        return 1

    del linked.fields[91]
    linked.answers["nvmlDeviceGetNvLinkState"] = state

    assert {0: True, 1: True} == nvml.nvlink(UUID).up


def test_gpu_without_nvlink(nvml: PyNvml) -> None:
    """No link is no series, not eighteen that are down."""
    assert NvLink() == nvml.nvlink(UUID)


def test_ecc(binding: FakeBinding, nvml: PyNvml) -> None:
    """Errors by kind and scope."""
    binding.answers["nvmlDeviceGetEccMode"] = lambda gpu: [1, 0]
    binding.answers["nvmlDeviceGetTotalEccErrors"] = lambda gpu, kind, scope: 10 * kind + scope
    errors = {
        ("corrected", "volatile"): 0,
        ("corrected", "aggregate"): 1,
        ("uncorrected", "volatile"): 10,
        ("uncorrected", "aggregate"): 11,
    }

    assert Ecc(True, errors) == nvml.ecc(UUID)


def test_repairs(binding: FakeBinding, nvml: PyNvml) -> None:
    """Remapped rows of newer GPUs, retired pages of older ones."""
    binding.answers["nvmlDeviceGetRemappedRows"] = lambda gpu: (5, 2, 1, 0)
    newer = nvml.repairs(UUID)
    binding.fail("nvmlDeviceGetRemappedRows", NOT_SUPPORTED)
    binding.fields |= {29: 3, 30: 4, 31: 1}

    assert Repairs({"correctable": 5, "uncorrectable": 2}, True, False) == newer
    assert Repairs(
        retired_pages={"multiple_single_bit": 3, "double_bit": 4}, retirement_pending=True
    ) == nvml.repairs(UUID)


@pytest.mark.parametrize(
    ("number", "action"), [(0, "none"), (1, "gpu_reset"), (4, "drain_and_reset"), (99, None)]
)
def test_recovery_action(
    binding: FakeBinding, nvml: PyNvml, number: int, action: str | None
) -> None:
    """What the driver asks for has NVML's name; a number that nobody knows yet has none."""
    binding.fields[230] = number

    assert action == nvml.repairs(UUID).recovery_action


def test_values_that_a_gpu_lacks_are_absent(nvml: PyNvml) -> None:
    """On a card that knows none of it, nothing is 0."""
    assert Power(watts=412.5) == nvml.power(UUID)
    assert (Clocks(), Pcie(), Ecc(), Repairs()) == (
        nvml.clocks(UUID),
        nvml.pcie(UUID),
        nvml.ecc(UUID),
        nvml.repairs(UUID),
    )
    assert [None, None, None] == [nvml.bar1(UUID), nvml.mig(UUID), nvml.gpm(UUID)]
    assert Transfer() == nvml.pcie_throughput(UUID)


def sample(pid: int, when: float, sm: int, memory: int) -> SimpleNamespace:
    """One sample of a process's utilization, `when` in Unix seconds."""
    return SimpleNamespace(pid=pid, timeStamp=int(when * 1e6), smUtil=sm, memUtil=memory)


def test_process_utilization_is_the_newest_of_each_process(binding: FakeBinding) -> None:
    """Samples from before the window and shares of more than everything are no answer."""
    now = 1_000_000.0
    nvml = PyNvml(binding, clock=lambda: now)
    for index in range(nvml.count()):
        nvml.gpu(index)
    rows = [
        sample(7, now - 1, 80, 40),
        sample(7, now - 5, 10, 10),
        sample(8, now - 60, 50, 50),
        sample(9, now - 1, 4_000_000, 30),
    ]
    binding.answers["nvmlDeviceGetProcessUtilization"] = lambda gpu, since: rows

    assert {
        7: ProcessUtilization(0.8, 0.4),
        9: ProcessUtilization(None, 0.3),
    } == nvml.process_utilization(UUID)


@pytest.mark.parametrize("code", [0, NOT_FOUND, NOT_SUPPORTED])
def test_no_samples_are_no_utilization(binding: FakeBinding, nvml: PyNvml, code: int) -> None:
    """No sample, which nvidia-ml-py raises as an error with code 0, does not cost the GPU."""
    binding.answers["nvmlDeviceGetProcessUtilization"] = lambda gpu, since: []
    binding.fail("nvmlDeviceGetProcessUtilization", code)

    assert nvml.process_utilization(UUID) is None


def test_list_that_grew_meanwhile_is_asked_again(binding: FakeBinding, nvml: PyNvml) -> None:
    """A process that starts between the question for the length and the list does not hide the others."""
    answers = iter([7])

    def processes(gpu: int) -> list[SimpleNamespace]:
        for code in answers:
            raise binding.NVMLError(code)
        return [SimpleNamespace(pid=7, usedGpuMemory=5)]

    binding.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = processes
    found = nvml.processes(UUID)

    assert [7] == [process.pid for process in found or ()]


def test_unforeseen_code_costs_one_value(binding: FakeBinding, run_dir: object) -> None:
    """An unknown error of one call fails its collector for that GPU; the GPU is up and the rest is there."""
    binding.count = 2
    binding.fail("nvmlDeviceGetPowerUsage", UNKNOWN, gpu=0)
    with pytest.raises(NvmlCallError):
        Door(binding).ask("nvmlDeviceGetPowerUsage", 0)
    exporter = Exporter(PyNvml(binding), RunDirectory(run_dir))  # type: ignore[arg-type]
    shown = scrape(exporter)
    exporter.close()

    assert {"0": 1.0, "1": 1.0} == shown.by("gpu", "nvml_gpu_up")
    assert {"1"} == set(shown.by("gpu", "nvml_power_watts"))
    assert {"0", "1"} == set(shown.by("gpu", "nvml_temperature_celsius", sensor="gpu"))
    assert 0.0 == shown.value("torchmem_exporter_collector_success", collector="power")
    assert 1.0 == shown.value("torchmem_exporter_collector_success", collector="temperature")


def test_every_symbol_is_one_of_nvidias_binding() -> None:
    """What we say that we call exists under that name in nvidia-ml-py, whose functions drop some version suffixes."""
    pynvml = pytest.importorskip("pynvml")
    source = inspect.getsource(pynvml)

    assert [] == [name for name in SYMBOLS if f'"{name}"' not in source]
