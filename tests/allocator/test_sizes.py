"""Rounding of requests and of segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import (
    GIB,
    MIB,
    format_size,
    get_allocation_size,
    parse_size,
    round_size,
)


@pytest.mark.parametrize(
    ("size", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (700, 1024), (MIB, MIB)]
)
def test_a_request_is_rounded_to_512_bytes(size: int, block: int) -> None:
    """A block is the request rounded up to 512 bytes, and at least that."""
    assert block == round_size(size)


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
def test_segments_as_observed_on_pytorch(block: int, segment: int) -> None:
    """The segment asked from the driver is the one that PyTorch 2.13 was seen to ask for."""
    assert segment == get_allocation_size(block)


@given(st.integers(0, 1 << 40))
def test_rounding_wastes_less_than_its_unit(size: int) -> None:
    """A block holds its request with less than 512 bytes to spare, and a segment holds its block."""
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
        (1 << 30, "1024.00 MiB"),
        (80 << 30, "80.00 GiB"),
    ],
)
def test_sizes_are_written_as_in_pytorchs_errors(size: int, text: str) -> None:
    """Error texts show a size in the largest unit that it exceeds, with two digits."""
    assert text == format_size(size)


@pytest.mark.parametrize(
    ("words", "size"),
    [("24GB", 24 * 10**9), ("22.5GiB", int(22.5 * GIB)), ("8192MiB", 8 * GIB), ("8192 mib", 8 * GIB), ("1e9", 10**9),
     ("80g", 80 * 10**9), ("2Ti", 2 << 40)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(words: str, size: int) -> None:
    """Decimal and binary units, in any case."""
    assert size == parse_size(words)


@pytest.mark.parametrize(
    "words", ["", "0", "-5GB", "24 bananas", "1e99", "nan", "٣GB x", "9" * 400]
)
def test_what_is_no_size_is_refused(words: str) -> None:
    """The sentence shows how to write one."""
    with pytest.raises(ValueError, match=r"24GB or 22\.5GiB"):
        parse_size(words)
