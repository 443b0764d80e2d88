"""The allocator's settings: how they are written, and what they make of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig, parse_divisions
from torchmem.allocator.sizes import MIB

configs = st.builds(
    AllocatorConfig,
    expandable_segments=st.booleans(),
    max_split_size=st.none() | st.integers(21, 1000).map(lambda count: count * MIB),
    max_non_split_rounding_size=st.integers(21, 100).map(lambda count: count * MIB),
    large_segment_size=st.integers(20, 100).map(lambda count: count * MIB),
    roundup_power2_divisions=st.tuples(*[st.sampled_from([0, 1, 2, 4, 8])] * 16),
    throw_on_cudamalloc_oom=st.booleans(),
    garbage_collection_threshold=st.floats(0, 1, exclude_max=True),
)


@given(configs)
def test_the_text_of_a_sample_says_it_all(config: AllocatorConfig) -> None:
    """Settings written as text and read again are the same."""
    assert config == AllocatorConfig.of(config.settings())


def test_the_environment_is_read_as_pytorch_reads_it() -> None:
    """Megabytes are MiB, white space does not count, and keys that decide no request are left aside."""
    text = "expandable_segments:True, max_split_size_mb:64,backend:native,garbage_collection_threshold:0.8"
    expected = replace(
        DEFAULT_CONFIG,
        expandable_segments=True,
        max_split_size=64 * MIB,
        garbage_collection_threshold=0.8,
    )
    assert expected == AllocatorConfig.parse(text)
    assert DEFAULT_CONFIG == AllocatorConfig.parse("")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (*[1] * 9, 2, 4, *[8] * 5)),
        ("[2:1,16:8,64:4,>:2]", (1, 1, 0, 0, 8, 0, 4, *[2] * 9)),
        ("[>:2]", (0, *[2] * 15)),
        ("[32768:2,>:8,64:4]", (*[2] * 6, 4, *[2] * 9)),
    ],
)
def test_divisions_are_what_pytorch_says_it_parsed(text: str, expected: tuple[int, ...]) -> None:
    """The entries are those that `allocator_settings` of PyTorch 2.13 showed for each of these lists."""
    assert expected == parse_divisions(text)


@pytest.mark.parametrize(
    ("size", "rounded"), [(700, 1024), (1100, 1536), (100_000, 114_688), (3_145_733, 3_670_016)]
)
def test_requests_are_rounded_to_divisions(size: int, rounded: int) -> None:
    """With 4 divisions the blocks have the sizes that PyTorch 2.13 gave."""
    assert rounded == AllocatorConfig.parse("roundup_power2_divisions:4").round_size(size)


@given(configs, st.integers(1, 1 << 36))
def test_rounding_and_the_largest_request_agree(config: AllocatorConfig, block: int) -> None:
    """The largest request that fits a block is rounded to no more than the block, and one byte more is."""
    largest = config.largest_request(block)
    assert largest == 0 or config.round_size(largest) <= block
    assert config.round_size(largest + 1) > block


def test_the_segment_for_middle_sizes_can_be_set() -> None:
    """`large_segment_size_mb` is the segment for blocks between 1 and 10 MiB, and for no others."""
    config = AllocatorConfig.parse("large_segment_size_mb:40")
    sizes = (MIB, 2 * MIB, 10 * MIB - 512, 10 * MIB)
    assert [2 * MIB, 40 * MIB, 40 * MIB, 10 * MIB] == [
        config.get_allocation_size(size) for size in sizes
    ]
