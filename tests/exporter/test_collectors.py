"""The NVML collectors: everything that is known is served under its declared name, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from support.exposition import Exposition, scrape
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import GpuIdentity, NvmlCallError
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.exporter.values import (
    Bar1,
    Clocks,
    Ecc,
    Gpm,
    GpuEvent,
    MemoryInfo,
    Mig,
    MigInstance,
    NvLink,
    Pcie,
    Power,
    ProcessMemory,
    ProcessUtilization,
    Repairs,
    Temperatures,
    Transfer,
    Utilization,
    Versions,
)
from torchmem.sample.catalog import CATALOG

OpenExporter = Callable[..., Exporter]
GIB = 1 << 30
MEMORY = MemoryInfo(80 * GIB, 62 * GIB, 17 * GIB, GIB)
FULL = FakeGpu(
    GpuIdentity(0, "GPU-a", "H100", "00000000:18:00.0", "580", "96.00", "default", "enabled"),
    memory=MEMORY,
    unified_memory=False,
    bar1=Bar1(128 * GIB, GIB),
    utilization=Utilization(0.9, 0.5, 0.1, 0.2, 0.3, 0.4),
    power=Power(412.5, 650.0, 700.0, 5e6),
    temperatures=Temperatures({"gpu": 61, "memory": 70}, {"shutdown": 92}),
    clocks=Clocks({"sm": 1.7e9}, {"sm": 1.98e9}, {"sw_power_cap": True, "gpu_idle": False}, 0),
    fans=[0.3, None, 0.5],
    pcie=Pcie(1, 5, 8, 16, 12),
    pcie_throughput=Transfer(9000, 5000),
    nvlink=NvLink(
        {0: True, 1: False},
        {(0, "replay"): 3, (1, "replay"): 4, (0, "recovery"): 5},
        Transfer(7, 8),
    ),
    ecc=Ecc(True, {("corrected", "volatile"): 4}),
    repairs=Repairs({"correctable": 5}, False, True, {"double_bit": 2}, True, "gpu_reset"),
    mig=Mig(True, [MigInstance("MIG-a", 2, 0, "3g.40gb", MEMORY)]),
    processes=[ProcessMemory(1, 60 * GIB)],
    process_utilization={1: ProcessUtilization(0.8, 0.4)},
    gpm=Gpm(0.9, 0.45, 0.6, 0.3, Transfer(1, 2), Transfer(3, 4)),
    event_kinds=frozenset({"xid", "fatal_poison_error"}),
)


def full_scrape(open_exporter: OpenExporter) -> Exposition:
    """A node with one GPU of which everything is known, after an XID."""
    nvml = FakeNvml(lambda: [FULL], Versions("580", "13.580", "13.0"))
    exporter = open_exporter(nvml, pcie_throughput=True)
    scrape(exporter)
    nvml.subscriptions[0].coming.put(GpuEvent("GPU-a", "xid", 79))
    until(lambda: scrape(exporter).value("nvml_xid_errors_total", xid="79"))
    return scrape(exporter)


def test_full_gpu_gives_every_metric_of_the_catalogue(open_exporter: OpenExporter) -> None:
    """Nothing in the catalogue is a dead letter; only a GPU that fails has an error code."""
    declared = {name for name in CATALOG if name.startswith("nvml_")}
    served = {name for name, series in full_scrape(open_exporter).series.items() if series}

    assert declared - {"nvml_gpu_error_code"} == {
        name for name in served if name.startswith("nvml_")
    }


def test_labels_are_those_of_the_catalogue(open_exporter: OpenExporter) -> None:
    """Every sample carries exactly the declared labels, beside the facts of info metrics."""
    for name, series in full_scrape(open_exporter).series.items():
        spec = CATALOG[name]
        for labels in (dict(found) for found in series):
            facts = set() if spec.kind == "info" else set(labels) - set(spec.labels)
            empty = {"reason"} if name == "nvml_up" else set()
            assert (name, set(), True) == (name, facts, set(spec.labels) - empty <= set(labels))


VALUES: dict[str, dict[tuple[str, ...], float]] = {
    "nvml_unified_memory": {(): 0.0},
    "nvml_bar1_used_bytes": {(): float(GIB)},
    "nvml_utilization_ratio": {("jpeg",): 0.3, ("gpu",): 0.9},
    "nvml_power_limit_watts": {(): 650.0},
    "nvml_power_limit_max_watts": {(): 700.0},
    "nvml_energy_joules_total": {(): 5e6},
    "nvml_temperature_threshold_celsius": {("shutdown",): 92.0},
    "nvml_clock_hertz": {("sm",): 1.7e9},
    "nvml_clock_max_hertz": {("sm",): 1.98e9},
    "nvml_throttle_active": {("sw_power_cap",): 1.0, ("gpu_idle",): 0.0},
    "nvml_performance_state": {(): 0.0},
    "nvml_fan_speed_ratio": {("0",): 0.3, ("2",): 0.5},
    "nvml_pcie_link_generation": {(): 1.0},
    "nvml_pcie_link_max_generation": {(): 5.0},
    "nvml_pcie_link_width": {(): 8.0},
    "nvml_pcie_link_max_width": {(): 16.0},
    "nvml_pcie_replays_total": {(): 12.0},
    "nvml_pcie_throughput_bytes_per_second": {("rx",): 9000.0, ("tx",): 5000.0},
    "nvml_nvlink_up": {("0",): 1.0, ("1",): 0.0},
    "nvml_nvlink_errors_total": {("replay",): 7.0, ("recovery",): 5.0},
    "nvml_nvlink_bytes_total": {("rx",): 7.0, ("tx",): 8.0},
    "nvml_ecc_enabled": {(): 1.0},
    "nvml_ecc_errors_total": {("corrected", "volatile"): 4.0},
    "nvml_remapped_rows": {("correctable",): 5.0},
    "nvml_row_remap_pending": {(): 0.0},
    "nvml_row_remap_failed": {(): 1.0},
    "nvml_retired_pages": {("double_bit",): 2.0},
    "nvml_retired_pages_pending": {(): 1.0},
    "nvml_recovery_action": {("none",): 0.0, ("gpu_reset",): 1.0, ("node_reboot",): 0.0},
    "nvml_sm_active_ratio": {(): 0.9},
    "nvml_sm_occupancy_ratio": {(): 0.45},
    "nvml_tensor_active_ratio": {(): 0.6},
    "nvml_dram_active_ratio": {(): 0.3},
    "nvml_gpm_nvlink_bytes_per_second": {("rx",): 1.0, ("tx",): 2.0},
    "nvml_gpm_pcie_bytes_per_second": {("rx",): 3.0, ("tx",): 4.0},
}


def test_values_stand_under_their_names(open_exporter: OpenExporter) -> None:
    """Each value of the GPU is found again under the metric and the labels that it belongs to."""
    shown = scrape(open_exporter(FakeNvml.of(FULL), pcie_throughput=True))
    for name, values in VALUES.items():
        for labels, value in values.items():
            named = dict(zip(CATALOG[name].labels, ("0", "GPU-a", *labels), strict=True))
            assert (name, value) == (name, shown.value(name, **named))


def test_facts(open_exporter: OpenExporter) -> None:
    """Which GPU it is, how it is set up, and the versions below it."""
    shown = scrape(open_exporter(FakeNvml(lambda: [FULL], Versions("580", None, "13.0"))))
    (gpu,) = shown.series["nvml_gpu_info"]
    (driver,) = shown.series["nvml_driver_info"]

    assert {
        "compute_mode": "default",
        "persistence_mode": "enabled",
        "vbios_version": "96.00",
    }.items() <= dict(gpu).items()
    assert {"driver_version": "580", "cuda_version": "13.0"} == dict(driver)


def test_unknown_gpu_gives_no_value(open_exporter: OpenExporter) -> None:
    """Of a GPU that tells nothing there is only that it is up; every collector still succeeded."""
    shown = scrape(open_exporter(FakeNvml.of(FakeGpu(GpuIdentity(0, "GPU-a"), processes=None))))
    served = {name for name, series in shown.series.items() if series and name.startswith("nvml_")}

    assert {"nvml_up", "nvml_gpu_up", "nvml_gpu_info"} == served
    assert {1.0} == set(shown.by("collector", "torchmem_exporter_collector_success").values())


def test_pcie_throughput_is_asked_only_when_wanted(open_exporter: OpenExporter) -> None:
    """Measuring it takes time on every scrape: without the setting NVML is not asked."""

    class Careful(FakeNvml):
        def pcie_throughput(self, uuid: str) -> Transfer:
            """Must not be called."""
            raise AssertionError(uuid)

    shown = scrape(open_exporter(Careful.of(FULL)))

    assert {} == shown.matching("nvml_pcie_throughput_bytes_per_second")
    assert shown.value("torchmem_exporter_collector_success", collector="pcie_throughput") is None


SUBJECTS = sorted(
    {field.name for field in fields(FakeGpu)} - {"identity", "event_kinds", "error_code"}
)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("error", [NvmlCallError("nvmlAnything", 999), KeyError("unforeseen")])
def test_failure_of_one_subject_on_one_gpu_costs_nothing_else(
    open_exporter: OpenExporter, subject: str, error: Exception
) -> None:
    """Whatever goes wrong with one question to one GPU, the other GPU and all other subjects are complete."""
    first = replace(FULL, event_kinds=frozenset())
    second = replace(first, identity=GpuIdentity(1, "GPU-b"), mig=None)

    class Broken(FakeNvml):
        """Fails for one subject of the first GPU."""

    def fail(self: FakeNvml, uuid: str) -> object:
        if uuid == "GPU-a":
            raise error
        return getattr(second, subject)

    setattr(Broken, subject, fail)
    whole = scrape(open_exporter(FakeNvml.of(first, second), pcie_throughput=True))
    shown = scrape(open_exporter(Broken.of(first, second), pcie_throughput=True))
    failed = {
        name
        for name, ok in shown.by("collector", "torchmem_exporter_collector_success").items()
        if not ok
    }

    assert 1 <= len(failed) <= 2
    assert shown.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 1.0}
    for name in whole.series:
        assert whole.matching(name, uuid="GPU-b") == shown.matching(name, uuid="GPU-b")
    lost = {
        name
        for name in whole.series
        if whole.matching(name, uuid="GPU-a") and not shown.series.get(name)
    }
    assert all(name.startswith("nvml_") for name in lost)
