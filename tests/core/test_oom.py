"""The cause of an OutOfMemoryError, from what the observer knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.core.oom import OomFacts, classify
from torchmem.core.sample import OOM_CAUSES

GIB = 1 << 30
FULL = OomFacts(
    requested=2 * GIB, limit=80 * GIB, driver_free=1 * GIB, cached_free=0, reserved=78 * GIB, total=80 * GIB
)
sizes = st.integers(0, 80 * GIB)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (FULL, "capacity"),
        (replace(FULL, cached_free=30 * GIB), "fragmentation"),
        (replace(FULL, limit=40 * GIB, reserved=39 * GIB, driver_free=40 * GIB), "limit"),
        (replace(FULL, limit=40 * GIB, reserved=39 * GIB, driver_free=40 * GIB, cached_free=3 * GIB), "fragmentation"),
        (replace(FULL, reserved=10 * GIB), "external"),
        (replace(FULL, reserved=10 * GIB, total=None), "capacity"),
    ],
)
def test_causes(facts: OomFacts, cause: str) -> None:
    """Each cause is told from the others by the bytes that would have had to be free."""
    assert cause == classify(facts)


@given(st.builds(OomFacts, sizes, sizes, sizes, sizes, sizes, st.none() | sizes))
def test_every_oom_has_a_known_cause(facts: OomFacts) -> None:
    """Whatever the numbers, the cause is one of the four that the counter knows."""
    assert classify(facts) in OOM_CAUSES


@given(st.builds(OomFacts, sizes, sizes, sizes, sizes, sizes, st.just(80 * GIB)))
def test_fragmentation_means_that_compaction_would_have_helped(facts: OomFacts) -> None:
    """`fragmentation` is only said when the free bytes, in one piece, would have held the request."""
    if classify(facts) == "fragmentation":
        assert facts.requested <= facts.driver_free + facts.cached_free
