"""Which versions `make test-versions` tries, and what it records."""

from __future__ import annotations

from pathlib import Path

from docs.generate.versions import Result, results, span, supported, table
from versions.matrix import pairs, releases
from versions.results import junit_result, record

REPORT = """<testsuites><testsuite>
<testcase name="test_loop[default]" />
<testcase name="test_fork"><failure message="assert 1&#10; == 2">text</failure></testcase>
<testcase name="test_oom"><error message="no" /></testcase>
<testcase name="test_recorded_step"><skipped message="needs PyTorch 2.11" /></testcase>
</testsuite></testsuites>"""


def test_the_newest_patch_of_each_minor_release_is_tried() -> None:
    """Builds for the CPU, release candidates, and what is older than the oldest are left out."""
    listed = ["2.15.0", "2.13.1", "2.13.10", "2.9.1", "2.13.0+cpu", "2.16.0rc1", "2.1.2", "2.0.1"]

    assert releases(listed) == ["2.15.0", "2.13.10", "2.9.1", "2.1.2"]


def test_a_python_that_is_missing_is_reported() -> None:
    """It yields no pair, and one line says what to install."""
    said: list[str] = []

    assert list(pairs(["3.99"], [], said.append)) == []
    assert said == ["Python 3.99: not tried, it is not installed (pyenv install 3.99)"]


def test_a_report_of_pytest_is_read(tmp_path: Path) -> None:
    """Failures and errors keep their names and reasons; the other checks are counted."""
    path = tmp_path / "report.xml"
    path.write_text(REPORT)

    assert junit_result("3.12.1", "2.13.0", path) == Result(
        "3.12.1",
        "2.13.0",
        1,
        {"fork": "assert 1 == 2", "oom": "no"},
        {"recorded_step": "needs PyTorch 2.11"},
    )


def test_a_new_result_replaces_that_of_the_same_minor_versions(tmp_path: Path) -> None:
    """Other rows stay, in the order of their versions."""
    path = tmp_path / "results.json"
    for python, torch in [("3.9.1", "2.13.0"), ("3.11.1", "2.4.1"), ("3.9.2", "2.13.1")]:
        record(result(python, torch), path)

    assert [(row.python, row.torch) for row in results(path)] == [
        ("3.11.1", "2.4.1"),
        ("3.9.2", "2.13.1"),
    ]


def result(python: str, torch: str, *failed: str, passed: int = 1) -> Result:
    """Return a result in which some checks failed."""
    return Result(python, torch, passed, dict.fromkeys(failed, "why"), {})


def test_what_failed_or_was_not_tried_is_not_supported() -> None:
    """A version with a failed check, or without a check, is not claimed."""
    rows = [
        result("3.10.1", "2.4.1"),
        result("3.11.1", "2.4.1"),
        result("3.11.1", "2.13.0", "fork"),
        result("3.12.1", "2.15.0", passed=0),
    ]

    assert supported(rows) == (["3.10"], ["2.4"])
    assert table(rows).splitlines() == [
        "| PyTorch | Python |",
        "|---|---|",
        "| 2.15.0 | 3.12.1 (failed) |",
        "| 2.13.0 | 3.11.1 (failed: fork) |",
        "| 2.4.1 | 3.10.1, 3.11.1 |",
    ]


def test_a_gap_between_versions_is_shown() -> None:
    """Only versions without a gap are written as a range."""
    assert span(["2.9", "2.10", "2.11"]) == "2.9 to 2.11"
    assert span(["2.9", "2.11"]) == "2.9, 2.11"
    assert span(["2.9"]) == "2.9"
