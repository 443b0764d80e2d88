"""Files that need no sanitizing are decoded directly, and to the same samples as all others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from support.samples import full_sample, samples

from torchmem.exporter.plain_files import PlainFile
from torchmem.exporter.rejections import RejectedSampleError
from torchmem.exporter.sample_files import decode_possible
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES
from torchmem.sample.sample import Sample, encode
from torchmem.sample.untrusted import MAX_ITEMS, MAX_TEXT


def is_plain(data: bytes) -> bool:
    """Return whether a file needs no sanitizing."""
    file = PlainFile.of(data)
    return file is not None and file.is_plain


def outcome(data: bytes) -> object:
    """Return what is accepted of a file, or why it is rejected."""
    try:
        return decode_possible(data)
    except RejectedSampleError as error:
        return error.reason


def unusual(data: bytes) -> bytes:
    """Return the same document in a form that is not plain: with a space that JSON allows."""
    return data.replace(b"{", b"{\t", 1)


@settings(max_examples=40)
@given(samples)
@example(full_sample())
def test_both_ways_lead_to_the_same_sample(sample: Sample) -> None:
    """Decoding directly accepts the same values as sanitizing every value first."""
    assert outcome(encode(sample)) == outcome(unusual(encode(sample)))


def test_a_sample_of_the_sdk_is_plain() -> None:
    """What a rank usually publishes is decoded directly."""
    data = encode(full_sample())
    assert len(data) < MAX_SAMPLE_BYTES
    assert is_plain(data)
    assert not is_plain(unusual(data))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ("x" * MAX_TEXT, True),
        ("x" * (MAX_TEXT + 1), False),
        ("a\x7fb", False),
        ("é", False),
        ('"', False),
        ("GPU-e-1", True),
        (-1, False),
        (-0.5, False),
        (2e-05, True),
        (1e300, False),
        (10**17, False),
        (10**16, True),
        ([1] * MAX_ITEMS, True),
        ([1] * (MAX_ITEMS + 1), False),
        ([{}] * (MAX_ITEMS + 1), False),
        ({str(n): None for n in range(MAX_ITEMS + 1)}, False),
    ],
)
def test_what_might_be_out_of_bounds_is_not_plain(value: Any, plain: bool) -> None:
    """Text, numbers and lists beyond the bounds are sanitized or rejected as before."""
    document = json.dumps({"key": value}, separators=(",", ":"), ensure_ascii=False)
    assert is_plain(document.encode()) == plain
