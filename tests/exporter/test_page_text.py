"""Pages whose text is kept: always what prometheus_client writes, whatever changed in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from support.samples import full_sample, samples

from torchmem.exporter import page_text
from torchmem.exporter.page_text import Families, PageText
from torchmem.exporter.scrapes import OPENMETRICS, TEXT, Format
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.sample import Sample

FORMATS = pytest.mark.parametrize("kind", [TEXT, OPENMETRICS], ids=["text", "openmetrics"])


def page(found: Sequence[Sample], *, all_series: bool) -> list[Metric]:
    """Return the families of these samples as of ranks with different pids."""
    views = [ProcessView(sample, pid, "running", {}) for pid, sample in enumerate(found)]
    return list(families(views, all_series=all_series))


def text_of(kind: Format) -> PageText:
    """Return a new writer of pages."""
    return PageText(kind.encode, kind.end)


@FORMATS
@settings(max_examples=15)
@given(found=st.lists(st.lists(samples, max_size=2), min_size=1, max_size=3), every=st.booleans())
def test_a_page_is_what_prometheus_client_writes(
    kind: Format, found: list[list[Sample]], every: bool
) -> None:
    """Any pages one after another, with series that come, change and go, are written alike."""
    text = text_of(kind)
    for ranks in [*found, found[0]]:
        expected = kind.encode(Families(page(ranks, all_series=every)))
        assert text.write(page(ranks, all_series=every)) == expected


@FORMATS
def test_only_what_changed_is_encoded_again(kind: Format) -> None:
    """prometheus_client is not called for a page whose series are all known."""
    calls: list[object] = []

    def encode(registry: object) -> bytes:
        calls.append(registry)
        return kind.encode(registry)  # type: ignore[arg-type]

    text = PageText(encode, kind.end)
    text.write(page([full_sample()], all_series=True))
    first = len(calls)
    changed = full_sample()
    text.write(page([changed, changed], all_series=True))
    second = len(calls)
    text.write(page([changed, changed], all_series=True))

    assert 0 < second - first <= first
    assert len(calls) == second


def test_more_rows_than_are_kept_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, pages are as they would be below it."""
    found = page([full_sample()] * 3, all_series=True)
    monkeypatch.setattr(page_text, "MAX_KEPT_ROWS", 20)

    text = text_of(OPENMETRICS)
    pages = {text.write(found) for _ in range(3)}

    assert pages == {OPENMETRICS.encode(Families(found))}
