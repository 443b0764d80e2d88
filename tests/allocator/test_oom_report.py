"""OOM reports: JSON round trip, rejection of other input, and an explanation of every report."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import BY_NAME, CAPACITY, POOL, STRANDED, reports

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import (
    OomReport,
    aftermath,
    decode,
    encode,
    failure_reason,
    memory_parts,
    preceding_events,
)
from torchmem.explain.parts import part_words
from torchmem.explain.remedies import remedies
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def explain(report: OomReport) -> str:
    """Return all text that explains a report."""
    sentences = [*failure_reason(report), *preceding_events(report)]
    sentences += [remedy.text for remedy in remedies(report)]
    return " ".join(sentences + [part_words(part) for part in memory_parts(report)])


@given(reports)
def test_a_report_survives_encoding_and_decoding(report: OomReport) -> None:
    """A decoded report equals the encoded one, except for sanitized text, and can be explained."""
    read = decode(encode(report))

    assert sanitize_text(report.process.script or "") == (read.process.script or "")
    assert (report.oom, report.layout, report.trend) == (read.oom, read.layout, read.trend)
    assert explain(read)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_other_data_is_rejected(data: bytes) -> None:
    """Arbitrary bytes and arbitrary JSON raise UsageError and no other exception."""
    with pytest.raises(UsageError):
        decode(data)


@given(st.data())
def test_a_damaged_report_is_rejected_or_can_be_explained(data: st.DataObject) -> None:
    """With any value in any field, decoding raises UsageError or the report can be explained."""
    raw = json.loads(encode(data.draw(st.sampled_from(list(BY_NAME.values())))))
    target: Any = raw
    while isinstance(target, (dict, list)) and target:
        parent, key = (
            target,
            data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else [0])),
        )
        target = parent[key]
        if data.draw(st.booleans()):
            break
    parent[key] = data.draw(json_values | st.sampled_from([-1, 1 << 70, 1e308, [], {}]))
    with suppress(UsageError):
        assert explain(decode(json.dumps(raw).encode()))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty: run"),
        (b"[" * 100_000, "is not an OOM report: run"),
        (b"{}", "is not an OOM report: run"),
        (b'{"schema": 1}', "is not a valid OOM report"),
        (b'{"schema": 2}', "pip install --upgrade torchmem"),
        (
            encode(CAPACITY).replace(b'"fragmentation_ratio":[0.5', b'"fragmentation_ratio":[NaN'),
            "is not an OOM report: run",
        ),
        (encode(CAPACITY).replace(b'"steps":[100,', b'"steps":['), "differ in length"),
        (
            encode(CAPACITY).replace(b'"timestamp":1790000000.0', b'"timestamp":1e17', 1),
            "a time is out of bounds",
        ),
    ],
)
def test_the_error_gives_the_reason(data: bytes, sentence: str) -> None:
    """The error for an unusable file gives the reason."""
    with pytest.raises(UsageError, match=sentence):
        decode(data)


def test_a_report_is_small() -> None:
    """A report with a full trend of five minutes is smaller than 8 kB."""
    assert len(encode(CAPACITY)) < 8_000


@pytest.mark.parametrize(
    ("survived", "steps", "said"),
    [
        (False, 120, ""),
        (True, None, "The process caught the error and went on."),
        (True, 0, "The process caught the error and went on."),
        (True, 1, "The process caught the error and went on: 1 step ended after it."),
        (True, 1200, "The process caught the error and went on: 1,200 steps ended after it."),
    ],
)
def test_a_process_that_went_on(survived: bool, steps: int | None, said: str) -> None:
    """How many steps followed is said if there were some and they are known."""
    assert aftermath(replace(CAPACITY, survived=survived), steps) == said


def test_free_bytes_of_private_pools_are_told() -> None:
    """The headline and the reason have what is free in the pools, not only what is beside them."""
    assert headline(POOL) == (
        "Fragmentation: 9.00 GiB (11% of the GPU) was free in the pools of CUDA graphs and "
        "MemPools, which this request cannot use"
    )
    assert "pools of CUDA graphs and MemPools, 9.00 GiB is free." in " ".join(failure_reason(POOL))
    assert "pools" not in headline(STRANDED) + " ".join(failure_reason(STRANDED))
