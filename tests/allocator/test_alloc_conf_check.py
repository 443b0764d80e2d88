"""Settings that PyTorch 2.13 takes and refuses; each was tried on it."""

from __future__ import annotations

import pytest

from torchmem.allocator.settings import rejection_reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "expandable_segments:True,",
        "max_split_size_mb:20",
        "max_split_size_mb:16,large_segment_size_mb:12",
        "max_non_split_rounding_mb:12,large_segment_size_mb:12",
        "large_segment_size_mb:11",
        "roundup_power2_divisions:1",
        "roundup_power2_divisions:64",
        "roundup_power2_divisions:[256:1,512:2,>:4]",
        "garbage_collection_threshold:0.8, per_process_memory_fraction:0.9",
    ],
)
def test_what_pytorch_takes_is_not_refused(text: str) -> None:
    """A setting that PyTorch starts with passes."""
    assert rejection_reason(text) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_split_size_mb:19", "20 or more"),
        ("max_split_size_mb:32,large_segment_size_mb:64", "64 or more"),
        ("max_non_split_rounding_mb:24,large_segment_size_mb:30", "30 or more"),
        ("large_segment_size_mb:10", "over 10"),
        ("roundup_power2_divisions:3", "powers of 2"),
        ("roundup_power2_divisions:0", "powers of 2"),
        ("roundup_power2_divisions:[3:4]", "powers of 2"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:0", "between 0 and 1"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("expandable_segments:true", "True or False"),
        ("nonsense:1", "nonsense is not one of"),
        ("expandable_segments", "not a list"),
    ],
)
def test_what_pytorch_refuses_is_refused(text: str, part: str) -> None:
    """A setting that PyTorch stops at is refused in one sentence with the reason."""
    reason = rejection_reason(text)
    assert reason is not None
    assert part in reason
