"""Headroom is exact: it equals what can be allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

SCRIPT = Path(__file__).with_name("headroom_by_trying.py")


@pytest.mark.parametrize("environment", [{}, {"PENDING": "1"}], ids=["plain", "pending"])
def test_headroom_is_the_largest_allocation_that_succeeds(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """In 400 random states, exactly `headroom` bytes can be allocated, with and without a flush.

    This holds also where freed blocks wait for another stream.
    """
    done = run_on_phantom(
        SCRIPT, "400", "0", memory="1300MiB", state=tmp_path, environment=environment
    )

    assert done.stdout == "400 states, 0 disagreements\n", done.stderr[-2000:]
