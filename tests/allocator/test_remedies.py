"""Remedies fit the cause, the version, and what is set already."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import BY_NAME, EXTERNAL, LIMIT, STRANDED, reports

from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.remedies import conf_variable, remedies

KEYS = {
    "expandable_segments": "expandable_segments",
    "max_split_size": "max_split_size_mb",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "roundup_power2_divisions": "roundup_power2_divisions",
}


def _lines(report: OomReport) -> str:
    return "\n".join(line for remedy in remedies(report) for line in remedy.lines)


@given(reports, st.sets(st.sampled_from(sorted(KEYS))))
def test_nothing_is_suggested_that_is_on(report: OomReport, on: set[str]) -> None:
    """Whatever failed, no setting in force is named again."""
    values = {"expandable_segments": "True", "max_split_size": "134217728"}
    lines = _lines(
        replace(report, allocator_settings={name: values.get(name, "0.8") for name in on})
    )

    assert [name for name in on if KEYS[name] in lines] == []


@given(reports)
def test_there_is_always_something_to_do(report: OomReport) -> None:
    """Every report ends in advice, one sentence or more in each."""
    assert remedies(report)
    assert all(remedy.text.endswith((".", ":")) for remedy in remedies(report))


@given(reports)
def test_the_collector_is_for_processes_with_a_limit(report: OomReport) -> None:
    """`garbage_collection_threshold` does nothing without a memory fraction, so it is not named without one."""
    assert report.limit_bytes is not None or "garbage_collection_threshold" not in _lines(report)


@pytest.mark.parametrize(
    ("versions", "variable"),
    [
        ({"torch": "2.13.0+cu130"}, "PYTORCH_ALLOC_CONF"),
        ({"torch": "2.10.0"}, "PYTORCH_ALLOC_CONF"),
        ({"torch": "2.9.1+cu128"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"torch": "2.9.1+rocm6.4", "hip": "6.4"}, "PYTORCH_HIP_ALLOC_CONF"),
        ({"torch": "a fork"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_variable_is_one_that_the_version_reads(
    versions: dict[str, str], variable: str
) -> None:
    """2.9.1 silently ignores the new name (pytorch/pytorch#183387), so it gets the old one."""
    assert variable == conf_variable(versions)


def test_settings_are_added_to_those_there_are() -> None:
    """A line to type keeps the user's own settings, replaces the same key, and clears the name that would win."""
    there = {
        "expandable_segments": "False",
        "pytorch_cuda_alloc_conf": "roundup_power2_divisions:[256:1,>:4],expandable_segments:False",
        "roundup_power2_divisions": "1:1",
    }
    first, *_ = remedies(replace(STRANDED, allocator_settings=there))

    assert (
        "unset PYTORCH_CUDA_ALLOC_CONF",
        "export PYTORCH_ALLOC_CONF='roundup_power2_divisions:[256:1,>:4],expandable_segments:True'",
    ) == first.lines


def test_the_fraction_named_is_enough() -> None:
    """After raising the limit as told the request fits below it."""
    fraction = float(_lines(LIMIT).split("fraction(")[1].split(",")[0])
    reserved, total = LIMIT.reserved_bytes, LIMIT.device.total_bytes

    assert reserved is not None
    assert total is not None
    assert reserved + LIMIT.oom.requested_bytes <= fraction * total
    assert fraction <= 1


def test_the_query_names_the_device() -> None:
    """For memory held by others the question to Prometheus is ready to paste."""
    assert f'nvml_process_memory_bytes{{uuid="{EXTERNAL.device.uuid}"}}' in _lines(EXTERNAL)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_causes_have_advice_of_their_own(name: str) -> None:
    """Each kind of OOM begins with another remedy than `capacity`, unless it is of that kind."""
    own = remedies(BY_NAME[name])[0] not in remedies(BY_NAME["capacity"])

    assert own == (name not in {"capacity", "bare"})
