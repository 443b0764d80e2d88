"""Rounding of requests and segments, and sizes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import (
    GIB,
    MIB,
    format_index,
    format_size,
    get_allocation_size,
    parse_size,
    round_size,
)


@pytest.mark.parametrize(
    ("size", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (700, 1024), (MIB, MIB)]
)
def test_a_request_is_rounded_to_512_bytes(size: int, block: int) -> None:
    """A block is the request rounded up to a multiple of 512 bytes, and at least 512 bytes."""
    assert block == round_size(size)


@pytest.mark.parametrize(
    ("index", "text"),
    [(0.0, "0.00"), (0.844, "0.84"), (0.845001, "0.85"), (0.29, "0.29"), (1 - 1e-12, "0.99")],
)
def test_an_index_below_1_is_never_shown_as_1(index: float, text: str) -> None:
    """A fragmentation index is rounded to two digits, but 1 would say that nothing is free."""
    assert text == format_index(index)


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_segment_sizes_are_those_of_pytorch(block: int, segment: int) -> None:
    """Segment sizes equal those observed with PyTorch 2.13."""
    assert segment == get_allocation_size(block)


@given(st.integers(0, 1 << 40))
def test_rounding_adds_less_than_512_bytes(size: int) -> None:
    """A block exceeds its request by less than 512 bytes, and a segment holds its block."""
    block = round_size(size)
    assert block % 512 == 0
    assert size <= block < max(size, 1) + 512
    assert block <= get_allocation_size(block)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (512, "512 bytes"),
        (1536, "1.50 KiB"),
        (20 * MIB, "20.00 MiB"),
        (GIB - 1, "1.00 GiB"),
        (GIB, "1.00 GiB"),
        (80 << 30, "80.00 GiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_fits(size: int, text: str) -> None:
    """A size is shown with two digits, of which those before the point are at most 1023."""
    assert text == format_size(size)


@pytest.mark.parametrize(
    ("like", "text"),
    [(512, "20971520 bytes"), (1536, "20480.00 KiB"), (MIB, "20.00 MiB"), (GIB, "0.02 GiB")],
)
def test_sizes_of_a_table_have_one_unit(like: int, text: str) -> None:
    """A size is shown in the unit of another one."""
    assert text == format_size(20 * MIB, like)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("22.5GiB", int(22.5 * GIB)),
        ("8192MiB", 8 * GIB),
        ("8192 mib", 8 * GIB),
        ("1e9", 10**9),
        ("80g", 80 * 10**9),
        ("2Ti", 2 << 40),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    """A size may have a decimal or binary unit, in upper or lower case, or none."""
    assert size == parse_size(text)


@pytest.mark.parametrize("text", ["", "0", "-5GB", "24 bananas", "1e99", "nan", "٣GB x", "9" * 400])
def test_other_text_is_not_a_size(text: str) -> None:
    """The error shows how to write a size."""
    with pytest.raises(ValueError, match=r"24GB or 22\.5GiB"):
        parse_size(text)
