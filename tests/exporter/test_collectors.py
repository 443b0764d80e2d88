"""The NVML collectors: all known values are served under their declared names, nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.exposition import Exposition, scrape
from support.waiting import until

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuEvent, GpuIdentity, GpuValue, Versions
from torchmem.exporter.nvml import NvmlCallError
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.gpm import Gpm
from torchmem.exporter.subjects.memory import Bar1, MemoryInfo, UnifiedMemory
from torchmem.exporter.subjects.mig import Mig, MigInstance
from torchmem.exporter.subjects.nvlink import NvLink
from torchmem.exporter.subjects.pcie import Pcie, PcieThroughput, Traffic
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes, ProcessMemory, ProcessUtilization
from torchmem.exporter.subjects.temperature import Fans, Temperatures
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.metrics.catalog import CATALOG

OpenExporter = Callable[..., Exporter]
GIB = 1 << 30
MEMORY = MemoryInfo(80 * GIB, 62 * GIB, 17 * GIB, GIB)
VALUES: tuple[GpuValue, ...] = (
    MEMORY,
    UnifiedMemory(False),
    Bar1(128 * GIB, GIB),
    Utilization(0.9, 0.5, 0.1, 0.2, 0.3, 0.4),
    Power(412.5, 650.0, 700.0, 5e6),
    Temperatures({"gpu": 61, "memory": 70}, {"shutdown": 92}),
    Clocks({"sm": 1.7e9}, {"sm": 1.98e9}, {"sw_power_cap": True, "gpu_idle": False}, 0),
    Fans([0.3, None, 0.5]),
    Pcie(1, 5, 8, 16, 12),
    PcieThroughput(Traffic(9000, 5000)),
    NvLink(
        {0: True, 1: False},
        {(0, "replay"): 3, (1, "replay"): 4, (0, "recovery"): 5},
        Traffic(7, 8),
    ),
    Ecc(True, {("corrected", "volatile"): 4}),
    Repairs({"correctable": 5}, False, True, {"double_bit": 2}, True, "gpu_reset"),
    Mig(True, [MigInstance("MIG-a", 2, 0, "3g.40gb", MEMORY)]),
    Processes([ProcessMemory(1, 60 * GIB)], {1: ProcessUtilization(0.8, 0.4)}, MEMORY),
    Gpm(0.9, 0.45, 0.6, 0.3, Traffic(1, 2), Traffic(3, 4)),
)
IDENTITY = GpuIdentity(0, "GPU-a", "H100", "00000000:18:00.0", "580", "96.00", "default", "enabled")
FULL = FakeGpu(IDENTITY, *VALUES, event_kinds=["xid", "fatal_poison_error"])


def full_scrape(open_exporter: OpenExporter) -> Exposition:
    """Scrape a node with one GPU of which everything is known, after an XID error."""
    nvml = FakeNvml(lambda: [FULL], Versions("580", "13.580", "13.0"))
    exporter = open_exporter(nvml, pcie_throughput=True)
    scrape(exporter)
    nvml.subscriptions[0].coming.put(GpuEvent("GPU-a", "xid", 79))
    until(lambda: scrape(exporter).value("nvml_xid_errors_total", xid="79"))
    return scrape(exporter)


def test_full_gpu_has_every_metric_of_the_catalog(open_exporter: OpenExporter) -> None:
    """Every declared metric is served; only a GPU that fails has an error code.

    The GPU was given to no job, so none leaves it empty.
    """
    declared = {name for name in CATALOG if name.startswith("nvml_")}
    kinds = ("assignment_info", "assigned_empty_seconds")
    declared -= {f"nvml_{what}_{kind}" for what in ("gpu", "mig") for kind in kinds}
    served = {name for name, series in full_scrape(open_exporter).series.items() if series}

    assert declared - {"nvml_gpu_error_code"} == {
        name for name in served if name.startswith("nvml_")
    }


def test_labels_are_those_of_the_catalog(open_exporter: OpenExporter) -> None:
    """Every sample has exactly the declared labels, and info metrics also their facts."""
    for name, series in full_scrape(open_exporter).series.items():
        spec = CATALOG[name]
        for labels in (dict(pairs) for pairs in series):
            facts = set() if spec.kind == "info" else set(labels) - set(spec.labels)
            empty = {"reason"} if name == "nvml_up" else set()
            assert (name, set(), True) == (name, facts, set(spec.labels) - empty <= set(labels))


SERIES: dict[str, dict[tuple[str, ...], float]] = {
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


def test_values_have_their_names(open_exporter: OpenExporter) -> None:
    """Each value of the GPU has its own metric and labels."""
    exposition = scrape(open_exporter(FakeNvml.of(FULL), pcie_throughput=True))
    for name, values in SERIES.items():
        for labels, value in values.items():
            named = dict(zip(CATALOG[name].labels, ("0", "GPU-a", *labels), strict=True))
            assert (name, value) == (name, exposition.value(name, **named))


def test_facts(open_exporter: OpenExporter) -> None:
    """Info metrics describe the GPU, its modes, and the versions of the driver."""
    exposition = scrape(open_exporter(FakeNvml(lambda: [FULL], Versions("580", None, "13.0"))))
    (gpu,) = exposition.series["nvml_gpu_info"]
    (driver,) = exposition.series["nvml_driver_info"]

    assert {
        "compute_mode": "default",
        "persistence_mode": "enabled",
        "vbios_version": "96.00",
    }.items() <= dict(gpu).items()
    assert dict(driver) == {"driver_version": "580", "cuda_version": "13.0"}


def test_gpu_without_values_has_no_series(open_exporter: OpenExporter) -> None:
    """A GPU that reports nothing is only up; every collector still succeeds."""
    exposition = scrape(open_exporter(FakeNvml.of(FakeGpu(GpuIdentity(0, "GPU-a")))))
    served = {name for name, series in exposition.series.items() if series}

    assert {name for name in served if name.startswith("nvml_")} == {
        "nvml_up",
        "nvml_gpu_up",
        "nvml_gpu_info",
    }
    assert set(exposition.by("collector", "torchmem_exporter_collector_success").values()) == {1.0}


def test_pcie_throughput_is_read_only_if_set(open_exporter: OpenExporter) -> None:
    """Measuring it takes time in every scrape: without the setting it is not read."""
    kinds = set[object]()
    exporter = open_exporter(FakeNvml(lambda: [FULL], on_call=lambda kind, _: kinds.add(kind)))
    exposition = scrape(exporter)

    assert Pcie in kinds
    assert PcieThroughput not in kinds
    success = exposition.by("collector", "torchmem_exporter_collector_success")
    assert "pcie_throughput" not in success


@pytest.mark.parametrize("kind", [type(value) for value in VALUES])
@pytest.mark.parametrize("error", [NvmlCallError("nvmlAny", 999), KeyError("unforeseen")])
def test_failure_of_one_value_of_one_gpu_costs_nothing_else(
    open_exporter: OpenExporter, kind: type[GpuValue], error: Exception
) -> None:
    """Whatever goes wrong with one value of one GPU, everything else is complete."""
    others = [value for value in VALUES if not isinstance(value, Mig)]
    fake_gpus = [FakeGpu(IDENTITY, *VALUES), FakeGpu(GpuIdentity(1, "GPU-b"), *others)]

    def fail(call: object, gpu: object) -> None:
        if (call, gpu) == (kind, "GPU-a"):
            raise error

    whole = scrape(open_exporter(FakeNvml.of(*fake_gpus), pcie_throughput=True))
    broken = FakeNvml(lambda: fake_gpus, on_call=fail)
    exposition = scrape(open_exporter(broken, pcie_throughput=True))
    success = exposition.by("collector", "torchmem_exporter_collector_success")

    assert sum(not ok for ok in success.values()) == 1
    assert exposition.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 1.0}
    for name in whole.series:
        assert whole.matching(name, uuid="GPU-b") == exposition.matching(name, uuid="GPU-b")
    lost = {name for name in whole.series if not exposition.series.get(name)}
    assert all(name.startswith("nvml_") for name in lost if whole.matching(name, uuid="GPU-a"))
