"""The allocator's settings: parsing, ignored and rejected ones, and their effect on requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchmem.allocator.settings import (
    DEFAULT_CONFIG,
    LAST_PARSED,
    AllocatorConfig,
    ignored_settings,
    parse_alloc_conf,
    parse_divisions,
    rejection_reason,
)
from torchmem.allocator.sizes import MIB

words = st.text(
    st.characters(exclude_characters=",:[]", exclude_categories=["Z", "C"]), min_size=1, max_size=8
)
lists = st.lists(st.tuples(words, words), min_size=1, max_size=3).map(
    lambda pairs: "[" + ",".join(f"{size}:{count}" for size, count in pairs) + "]"
)
settings = st.dictionaries(words, words | lists, max_size=4)
spaces = st.sampled_from(["", " ", "\t", "  "])


@given(settings, spaces)
def test_settings_are_parsed_as_written(conf: dict[str, str], space: str) -> None:
    """Keys, values and bracketed lists are read whatever the white space between them."""
    text = f"{space},{space}".join(f"{key}{space}:{space}{value}" for key, value in conf.items())

    assert conf == parse_alloc_conf(space + text + space)


@given(st.text())
def test_any_text_can_be_parsed(text: str) -> None:
    """Any text gives a mapping of non-empty keys to non-empty values."""
    assert all(key and value for key, value in parse_alloc_conf(text).items())


def effective(parsed: str = "", **read: str) -> dict[str, str]:
    """Return the effective settings of the native allocator, by default with nothing set."""
    return {"backend": "native", "expandable_segments": "False", LAST_PARSED: parsed, **read}


@given(settings)
def test_parsed_settings_are_not_reported_as_ignored(conf: dict[str, str]) -> None:
    """If the allocator parsed the text of the environment, it ignored none of its own settings."""
    plain = {
        key: value for key, value in conf.items() if key not in {"backend", "expandable_segments"}
    }
    text = ",".join(f"{key}:{value}" for key, value in plain.items())

    assert dict.fromkeys(plain, False) == ignored_settings(
        {"PYTORCH_CUDA_ALLOC_CONF": text}, effective(text)
    )


@pytest.mark.parametrize(
    "variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
)
def test_all_settings_of_an_unread_variable_are_ignored(variable: str) -> None:
    """The variable was set too late, or this version of PyTorch does not read it."""
    environment = {variable: "expandable_segments:True,max_split_size_mb:128"}

    assert ignored_settings(environment, effective()) == {
        "expandable_segments": True,
        "max_split_size_mb": True,
    }


def test_a_setting_that_the_build_lacks_is_ignored() -> None:
    """A parsed setting may have no effect, as expandable segments without the driver's API."""
    text = "expandable_segments:True,max_split_size_mb:128"
    settings_in_effect = effective(text, max_split_size=str(128 << 20))

    assert ignored_settings({"PYTORCH_ALLOC_CONF": text}, settings_in_effect) == {
        "expandable_segments": True,
        "max_split_size_mb": False,
    }


def test_a_variable_that_another_one_overrides_is_ignored() -> None:
    """PyTorch reads one variable; if both have the same settings, none was ignored."""
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    settings_in_effect = effective("expandable_segments:True") | {"expandable_segments": "True"}
    same = dict.fromkeys(environment, "expandable_segments:True")

    assert ignored_settings(environment, settings_in_effect) == {
        "expandable_segments": False,
        "max_split_size_mb": True,
    }
    assert ignored_settings(same, settings_in_effect) == {"expandable_segments": False}


def test_only_the_backend_is_known_after_a_change_at_run_time() -> None:
    """After the script has set other settings, only the backend, which is fixed, is reported."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native,max_split_size_mb:64"}

    assert ignored_settings(environment, effective("max_split_size_mb:128")) == {"backend": False}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("cudaMallocAsync", {"backend": False}), ("native", {"backend": True}), ("pluggable", {})],
)
def test_other_backends_report_only_the_backend(backend: str, expected: dict[str, bool]) -> None:
    """Settings that only the native allocator reports are left out with other backends."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True"}

    assert ignored_settings(environment, {"backend": backend}) == expected


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
def test_settings_that_pytorch_accepts_are_accepted(text: str) -> None:
    """Settings with which PyTorch 2.13 starts have no rejection reason."""
    assert rejection_reason(text) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_split_size_mb:19", "20 or more"),
        ("max_split_size_mb:32,large_segment_size_mb:64", "64 or more"),
        ("max_non_split_rounding_mb:24,large_segment_size_mb:30", "30 or more"),
        ("large_segment_size_mb:10", "over 10"),
        (f"max_split_size_mb:{'9' * 5000}", "a whole number, 20 or more"),
        ("max_split_size_mb:٣٣", "a whole number, 20 or more"),
        ("roundup_power2_divisions:3", "powers of 2"),
        ("roundup_power2_divisions:0", "powers of 2"),
        ("roundup_power2_divisions:[3:4]", "powers of 2"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:0", "between 0 and 1"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("expandable_segments:true", "True or False"),
        ("nonsense:1", "nonsense is not an allocator setting: the settings are"),
        ("expandable_segments", "not a list"),
    ],
)
def test_settings_that_pytorch_rejects_are_rejected(text: str, part: str) -> None:
    """Settings at which PyTorch 2.13 raises an error are rejected with the reason."""
    reason = rejection_reason(text)
    assert reason is not None
    assert part in reason


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
def test_settings_survive_conversion_to_text(config: AllocatorConfig) -> None:
    """Settings written as text and read again are equal."""
    assert config == AllocatorConfig.of(config.settings())


def test_effective_settings_are_read_from_a_sample() -> None:
    """Text becomes bytes and counts; a missing setting has PyTorch's default."""
    text = {
        "expandable_segments": "True",
        "max_split_size": "67108864",
        "large_segment_size_mb": "40",
        "roundup_power2_divisions": "1:2,32768:4",
        "throw_on_cudamalloc_oom": "True",
    }
    expected = AllocatorConfig(
        expandable_segments=True,
        max_split_size=64 * MIB,
        max_non_split_rounding_size=40 * MIB,  # follows large_segment_size
        large_segment_size=40 * MIB,
        roundup_power2_divisions=(2, *[0] * 14, 4),
        throw_on_cudamalloc_oom=True,
    )
    assert AllocatorConfig.of(text) == expected


def test_settings_are_parsed_like_pytorch_does() -> None:
    """Megabytes are MiB; white space and keys that decide no request are ignored."""
    text = (
        "expandable_segments:True, max_split_size_mb:64,"
        "backend:native,garbage_collection_threshold:0.8"
    )
    expected = replace(
        DEFAULT_CONFIG,
        expandable_segments=True,
        max_split_size=64 * MIB,
        garbage_collection_threshold=0.8,
    )
    assert AllocatorConfig.parse(text) == expected
    assert AllocatorConfig.parse("") == DEFAULT_CONFIG


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
def test_divisions_are_parsed_like_pytorch_does(text: str, expected: tuple[int, ...]) -> None:
    """The entries equal `allocator_settings` of PyTorch 2.13 for each of these lists."""
    assert parse_divisions(text) == expected


@pytest.mark.parametrize(
    ("size", "rounded"), [(700, 1024), (1100, 1536), (100_000, 114_688), (3_145_733, 3_670_016)]
)
def test_requests_are_rounded_to_divisions(size: int, rounded: int) -> None:
    """With 4 divisions, blocks have the sizes observed with PyTorch 2.13."""
    assert rounded == AllocatorConfig.parse("roundup_power2_divisions:4").round_size(size)


@given(configs, st.integers(1, 1 << 36))
@example(AllocatorConfig(roundup_power2_divisions=(4,) * 16), 512 * 4)
def test_the_largest_request_is_the_inverse_of_rounding(
    config: AllocatorConfig, block: int
) -> None:
    """The largest request is rounded to at most the block, and one byte more exceeds it."""
    largest = config.largest_request(block)
    assert largest == 0 or config.round_size(largest) <= block
    assert config.round_size(largest + 1) > block


def test_large_segment_size_applies_to_blocks_of_1_to_10_mib() -> None:
    """`large_segment_size_mb` is the segment size for blocks of 1 to 10 MiB only."""
    config = AllocatorConfig.parse("large_segment_size_mb:40")
    sizes = (MIB, 2 * MIB, 10 * MIB - 512, 10 * MIB)
    assert [config.get_allocation_size(size) for size in sizes] == [
        2 * MIB,
        40 * MIB,
        40 * MIB,
        10 * MIB,
    ]


def test_the_size_of_large_segments_decides_which_block_may_be_used() -> None:
    """The rest that may stay unused follows large_segment_size_mb, unless it is set itself."""
    conf = "large_segment_size_mb:40,max_split_size_mb:48"
    block, request = 85 * MIB, 50 * MIB

    assert AllocatorConfig.parse(conf).may_use(block, request)
    assert not AllocatorConfig.parse("max_split_size_mb:48").may_use(block, request)
    limited = AllocatorConfig.parse(f"{conf},max_non_split_rounding_mb:41")
    assert limited.may_use(block, request)
    assert not limited.may_use(block + 6 * MIB, request)
