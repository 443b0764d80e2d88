"""What is read from PyTorch's allocator, by version and backend, on fake torch modules."""

from __future__ import annotations

from typing import Any

import pytest
from support.snapshots import segment
from support.torch_versions import Version, fake_torch

from torchmem.allocator.sizes import MIB
from torchmem.sdk.pytorch.allocator_reader import AllocatorReader

SEGMENTS = [dict(segment(1 << 40, "large", [(20 * MIB, "inactive")]))]
VERSIONS: list[Version] = [(2, 1), (2, 3), (2, 5), (2, 6), (2, 8), (2, 11), (2, 13)]


def stats(peak: int) -> dict[str, Any]:
    """Nested statistics in which every number is `peak`."""
    pools = {
        pool: {"current": peak, "peak": peak, "freed": peak}
        for pool in ("all", "small_pool", "large_pool")
    }
    names = (
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "requested_bytes",
        "inactive_split_bytes",
    )
    return dict.fromkeys(names, pools) | {"num_ooms": peak, "num_alloc_retries": peak}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_returns_its_segments(version: Version) -> None:
    """The snapshot call fits the version, and settings are known from 2.3 on."""
    torch = fake_torch(version, segments=SEGMENTS)
    reader = AllocatorReader(torch, {})

    assert (reader.segments(), len(torch.snapshots)) == (SEGMENTS, 1)
    assert ("expandable_segments" in reader.settings()) == (version >= (2, 3))
    assert (None if version < (2, 6) else 0.5) == reader.fraction(0)


@pytest.mark.parametrize("version", VERSIONS)
def test_snapshots_pause_while_history_cannot_be_left_out(version: Version) -> None:
    """Before 2.11 a recorded history would be copied completely; since then it is left out."""
    torch = fake_torch(version, segments=SEGMENTS, recording=True)

    assert (AllocatorReader(torch, {}).segments() is not None) == (version >= (2, 11))
    assert (len(torch.snapshots) == 1) == (version >= (2, 11))


def test_settings_cost_no_snapshot_of_their_own() -> None:
    """They come with the newest snapshot; only the first call takes one."""
    torch = fake_torch(segments=SEGMENTS)
    reader = AllocatorReader(torch, {})

    assert reader.settings() == reader.settings()
    reader.segments()
    reader.settings()
    assert len(torch.snapshots) == 2


def test_settings_are_what_was_parsed() -> None:
    """Settings missing in the snapshot come from the parsed string; unset ones are absent."""
    raw = {
        "PYTORCH_CUDA_ALLOC_CONF": (
            "large_segment_size_mb:40,max_split_size_mb:64,roundup_power2_divisions:[2:2]"
        ),
        "max_split_size": 64 * MIB,
        "expandable_segments": False,
        "max_cached_size": -1,
        "roundup_power2_divisions": {"1": 0, "2": 2},
    }

    expected = {
        "pytorch_cuda_alloc_conf": raw["PYTORCH_CUDA_ALLOC_CONF"],
        "large_segment_size_mb": "40",
        "max_split_size": str(64 * MIB),
        "expandable_segments": "False",
        "roundup_power2_divisions": "2:2",
        "backend": "native",
    }
    assert AllocatorReader(fake_torch(settings=raw), {}).settings() == expected


def test_other_backends_take_no_snapshot() -> None:
    """cudaMallocAsync and pluggable allocators would raise; only the backend's name is known."""
    for backend in ("cudaMallocAsync", "pluggable"):
        torch = fake_torch(backend=backend, segments=SEGMENTS)
        reader = AllocatorReader(torch, {})

        assert (None, {"backend": backend}, []) == (
            reader.segments(),
            reader.settings(),
            torch.snapshots,
        )


def test_cuda_malloc_async_keeps_three_totals() -> None:
    """Only `all` of allocated, active, and reserved bytes is kept; PyTorch's zeros are not."""
    kept = AllocatorReader(fake_torch(backend="cudaMallocAsync"), {}).kept_stats(stats(5))

    both = {"all": {"current": 5, "peak": 5}}
    assert {"allocated_bytes": both, "active_bytes": both, "reserved_bytes": both} == kept


@pytest.mark.parametrize(
    ("version", "variable", "caching", "peak", "known"),
    [
        ((2, 13), {}, True, 0, True),  # nothing allocated yet: true zeros
        ((2, 13), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, False, 0, False),
        ((2, 13), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, True, 5, True),  # 2.13 reads "0" as no
        (
            (2, 3),
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"},
            True,
            0,
            False,
        ),  # older ones read it as yes
        ((2, 13), {"PYTORCH_NO_HIP_MEMORY_CACHING": "1"}, False, 0, False),
        ((2, 13), {}, False, 0, False),  # torch.cuda.memory.caching_allocator_enable(False)
        ((2, 13), {}, False, 5, True),  # turned off later: what is cached is still counted
    ],
)
def test_zeros_of_a_cache_that_is_off_are_unknown(
    version: Version, variable: dict[str, str], caching: bool, peak: int, known: bool
) -> None:
    """Statistics and segments are unknown if allocations bypass a cache that was never used."""
    reader = AllocatorReader(
        fake_torch(version, segments=SEGMENTS if peak else (), caching=caching), variable
    )

    assert (known, known) == (
        reader.kept_stats(stats(peak)) is not None,
        reader.segments() is not None,
    )
    assert (not known) == (reader.settings().get("caching") == "False")
