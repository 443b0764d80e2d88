"""The comparison of test suites with and without torchmem."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.monitored_runs import PLAIN, RUN, VARIABLE
from experiments.suites.__main__ import differences, is_changed, read_outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="fails"><failure/></testcase>
<testcase classname="a" name="cannot"><error/></testcase>
<testcase classname="a" name="skips"><skipped/></testcase>
<testcase classname="a" name="again"/><testcase classname="a" name="again"><failure/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_those_of_the_report(tmp_path: Path) -> None:
    """Each test has one outcome, or both if it ran twice."""
    (tmp_path / "report.xml").write_text(REPORT)
    assert read_outcomes(tmp_path / "report.xml") == {
        "a::passes": "passed",
        "a::fails": "failure",
        "a::cannot": "error",
        "a::skips": "skipped",
        "a::again": "passed+failure",
    }


@pytest.mark.parametrize(
    ("first", "second", "changed"),
    [
        ("pfp", "pfp", True),
        ("ppf", "ppf", True),
        ("pp-", "pp-", True),
        ("pfp", "ppp", False),
        ("pfp", "fpp", False),
        ("pfp", "ffp", False),
    ],
)
def test_a_change_differs_from_each_plain_outcome(first: str, second: str, changed: bool) -> None:
    """Outcomes are plain, with TORCHMEM=1 and under `torchmem run`; - is a test that is absent."""
    runs = [
        {
            way: {"test": outcome} if outcome != "-" else {}
            for way, outcome in zip((PLAIN, VARIABLE, RUN), run, strict=True)
        }
        for run in (first, second)
    ]
    assert differences(runs[0]) == ["test"]
    assert changed == is_changed("test", *runs)
