"""The catalog of GPUs, and the names that it accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import GIB, MIB
from torchmem.phantom.gpus import CATALOG, GpuModel, context_bytes, parse_gpu_model, parse_memory
from torchmem.sample.errors import UsageError


@pytest.mark.parametrize("gpu", CATALOG, ids=lambda gpu: gpu.name)
def test_each_gpu_has_the_memory_in_its_name(gpu: GpuModel) -> None:
    """A GPU has 90 to 100 % of its advertised memory; its context takes less than 3 % of it."""
    sold = {
        "rtx-3090": 24,
        "rtx-4090": 24,
        "rtx-5090": 32,
        "rtx-a6000": 48,
        "rtx-6000-ada": 48,
        "rtx-pro-6000": 96,
    }
    gigabytes = sold.get(gpu.name) or int(gpu.name.rsplit("-", 1)[1].removesuffix("gb"))

    assert 0.90 * gigabytes <= gpu.memory_bytes / GIB <= gigabytes
    assert 100 * MIB < gpu.context_bytes < 0.03 * gpu.memory_bytes
    assert gpu == parse_gpu_model(gpu.name)


def test_names_are_unique() -> None:
    """No two GPUs have the same name or product."""
    for values in ([gpu.name for gpu in CATALOG], [gpu.product for gpu in CATALOG]):
        assert len(values) == len(set(values))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100-80gb", "h100-80gb"),
        (" H100-80GB ", "h100-80gb"),
        ("h200", "h200-141gb"),
        ("RTX 4090", "rtx-4090"),
    ],
)
def test_names_are_matched_leniently(text: str, name: str) -> None:
    """Case and spaces do not matter, and a unique prefix is enough."""
    assert name == parse_gpu_model(text).name


def test_a_size_is_a_gpu_too() -> None:
    """24GB is an H100 with that much memory."""
    gpu = parse_gpu_model("22.5GiB")

    assert (int(22.5 * 2**30), 132, (9, 0)) == (
        gpu.memory_bytes,
        gpu.multiprocessors,
        gpu.capability,
    )
    assert parse_gpu_model("24GB").memory_bytes == 24 * 10**9


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("h100", "h100-80gb, h100-nvl-94gb"),
        ("a100-48gb", "a100-40gb"),
        ("-5GB", "memory size"),
        ("", "the known GPUs are v100"),
    ],
)
def test_an_unknown_gpu_is_a_usage_error_with_a_hint(text: str, hint: str) -> None:
    """The error names the closest GPUs, or all GPUs if none is close."""
    with pytest.raises(UsageError, match="is not a known GPU") as caught:
        parse_gpu_model(text)

    assert hint in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_gpu_or_a_usage_error(text: str) -> None:
    """No text causes another error, and a GPU always has memory."""
    try:
        gpu = parse_gpu_model(text)
    except UsageError:
        return

    assert gpu.memory_bytes >= 1


@given(st.integers(1, 10**6), st.sampled_from(["", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_sizes_are_exact(number: int, unit: str) -> None:
    """A whole number of units is exactly that many bytes, in upper and lower case."""
    factor = {"": 1, "K": 1, "M": 2, "G": 3}[unit[:1]]
    expected = number * (1024 if "i" in unit else 1000) ** factor if unit else number

    assert expected == parse_memory(f"{number}{unit}") == parse_memory(f"{number} {unit.lower()}")


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "seen_mib"),
    [(48, (8, 6), 210), (58, (8, 9), 251), (142, (8, 9), 507), (108, (8, 0), 502)],
    ids=["RTX A4000", "L4", "L40", "A100"],
)
def test_the_context_estimate_matches_public_figures(
    multiprocessors: int, capability: tuple[int, int], seen_mib: int
) -> None:
    """It is within 10 % of the memory outside the allocator in public OutOfMemoryErrors."""
    assert context_bytes(multiprocessors, capability) / MIB == pytest.approx(seen_mib, rel=0.10)


def test_the_page_names_the_catalog(root: Path) -> None:
    """docs/phantom.md has each GPU's name, in the order of the catalog."""
    section = (root / "docs" / "phantom.md").read_text().split("\n## The GPUs\n")[1]

    assert re.findall(r"`([a-z0-9]+-[a-z0-9-]+)`", section.split("\n\n")[0]) == [
        gpu.name for gpu in CATALOG
    ]
