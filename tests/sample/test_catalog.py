"""The catalog follows Prometheus' naming rules."""

from __future__ import annotations

import re

import pytest

from torchmem.metrics.catalog import CATALOG, MetricSpec

UNITS = ("_bytes", "_seconds", "_ratio", "_watts", "_celsius", "_hertz", "_bytes_per_second")
UNITLESS = {
    "torchmem_gpu_hour_price",
    "nvml_ecc_enabled",
    "nvml_gpu_error_code",
    "nvml_gpu_up",
    "nvml_mig_enabled",
    "nvml_nvlink_up",
    "nvml_pcie_link_generation",
    "nvml_pcie_link_max_generation",
    "nvml_pcie_link_max_width",
    "nvml_pcie_link_width",
    "nvml_performance_state",
    "nvml_processes",
    "nvml_recovery_action",
    "torchmem_release_enabled",
    "nvml_remapped_rows",
    "nvml_retired_pages",
    "nvml_retired_pages_pending",
    "nvml_row_remap_failed",
    "nvml_row_remap_pending",
    "nvml_throttle_active",
    "nvml_unified_memory",
    "nvml_up",
    "torchmem_allocator_setting_ignored",
    "torchmem_blocks",
    "torchmem_exporter_collector_success",
    "torchmem_exporter_run_directory_free_inodes",
    "torchmem_step_growth_start_steps",
    "torchmem_exporter_run_directory_inodes",
    "torchmem_exporter_run_directory_problem",
    "torchmem_process_kill_cause",
    "torchmem_process_state",
    "torchmem_segments",
}


@pytest.mark.parametrize("spec", CATALOG.values(), ids=lambda spec: spec.name)
def test_the_suffix_of_a_name_fits_its_kind_and_unit(spec: MetricSpec) -> None:
    """Only counters end in `_total`, only infos in `_info`, and other metrics in a base unit."""
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert (spec.kind == "info") == spec.name.endswith("_info")
    if spec.kind in {"gauge", "histogram", "gaugehistogram"}:
        assert spec.name.endswith(UNITS) or spec.name in UNITLESS


@pytest.mark.parametrize("spec", CATALOG.values(), ids=lambda spec: spec.name)
def test_help_is_a_sentence_and_labels_are_lower_case(spec: MetricSpec) -> None:
    """The help text is one sentence; label names are lower case and unique."""
    assert re.fullmatch(r"[A-Z1].*\.", spec.help)
    assert all(re.fullmatch(r"[a-z_]+", label) for label in spec.labels)
    assert len(spec.labels) == len(set(spec.labels))
