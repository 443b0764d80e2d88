"""OOM reports go to JSON and back, and what is no report never does harm."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reports import BY_NAME, CAPACITY, reports

from torchmem.allocator.oom_report import (
    OomReport,
    decode,
    encode,
    failure_reason,
    memory_breakdown,
    preceding_events,
    summary,
)
from torchmem.allocator.remedies import remedies
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def explain(report: OomReport) -> str:
    """Everything that is ever said about a report."""
    words = [summary(report), *failure_reason(report), *preceding_events(report)]
    words += [remedy_.text for remedy_ in remedies(report)]
    return " ".join(words + [name for name, _ in memory_breakdown(report)])


@given(reports)
def test_a_report_survives_the_way_to_the_file_and_back(report: OomReport) -> None:
    """What was written is what is read, but for text that would harm a terminal; and it can be explained."""
    read = decode(encode(report))

    assert sanitize_text(report.process.script or "") == (read.process.script or "")
    assert (report.oom, report.layout, report.trend) == (read.oom, read.layout, read.trend)
    assert explain(read)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_report_are_refused(data: bytes) -> None:
    """Arbitrary bytes and arbitrary JSON end in UsageError and in no other exception."""
    with pytest.raises(UsageError):
        decode(data)


@given(st.data())
def test_a_damaged_report_is_refused_or_can_still_be_explained(data: st.DataObject) -> None:
    """Whatever value stands in whatever place, the file is refused or every sentence can be made."""
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
        (b"", "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b"{}", "is not an OOM report of torchmem"),
        (b'{"schema": 1}', "is not a sound OOM report"),
        (b'{"schema": 2}', "pip install --upgrade torchmem"),
        (
            encode(CAPACITY).replace(b'"fragmentation_ratio":[0.5', b'"fragmentation_ratio":[NaN'),
            "holds no JSON",
        ),
        (encode(CAPACITY).replace(b'"steps":[100,', b'"steps":['), "differ in length"),
        (
            encode(CAPACITY).replace(b'"timestamp":1790000000.0', b'"timestamp":1e17', 1),
            "a time is out of bounds",
        ),
    ],
)
def test_each_refusal_says_why(data: bytes, sentence: str) -> None:
    """A file that cannot be used is refused with its reason."""
    with pytest.raises(UsageError, match=sentence):
        decode(data)


def test_a_report_is_a_few_kilobytes() -> None:
    """A report with five full minutes stays small."""
    assert len(encode(CAPACITY)) < 8_000
