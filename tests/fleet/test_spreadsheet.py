"""The CSV of a fleet is safe to open."""

from __future__ import annotations

import pytest

from torchmem.fleet.report import Bill, FleetReport
from torchmem.fleet.spreadsheet import table


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(1)"])
def test_a_name_is_no_formula(name: str) -> None:
    """A spreadsheet would calculate what a user has chosen as the name of a run."""
    bill = Bill(1.5, 0, 0, 0, 0, run=name, user="a,b")
    report = FleetReport(0, 1, bill, 1.5, 0, 0, None, [bill], [], [], [], [], [], [], [])

    assert table(report).splitlines()[1] == f'\'{name},"a,b",,,1.5,0,0,0,0'
