"""The runbooks fit the alerts, and what they tell to ask exists."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
from support import promql

BOOKS = promql.ROOT / "docs" / "runbooks"
ALERTS = {rule["alert"] for rule in promql.rules("alert")}
# What begins like a series, or a function or aggregation over one; shell commands do not.
QUERY = re.compile(r"((\w+:)?(torchmem|nvml)_\w+(:\w+)?|\w+[ (]+.*(torchmem|nvml)_\w+)[^#]*")


def queries() -> list[tuple[str, str]]:
    """Page and PromQL of every indented line that is a query."""
    lines = [
        (page.stem, line)
        for page in sorted(BOOKS.glob("*.md"))
        for line in page.read_text().splitlines()
    ]
    texts = [(page, line.split("#")[0].strip()) for page, line in lines if line.startswith("    ")]
    return [
        (page, text)
        for page, text in texts
        if QUERY.fullmatch(text) and not text.startswith(("torchmem ", "curl"))
    ]


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    """No alert without a runbook, none for an alert that is gone, all in the index and in docs/alerts.md."""
    pages = {page.stem for page in BOOKS.glob("Torchmem*.md")}

    assert pages == ALERTS
    assert pages == set(re.findall(r"\((Torchmem\w+)\.md\)", (BOOKS / "README.md").read_text()))
    alerts = (promql.ROOT / "docs" / "alerts.md").read_text()
    assert pages == set(re.findall(r"\(runbooks/(Torchmem\w+)\.md\)", alerts))


@pytest.mark.parametrize("page", sorted(BOOKS.glob("Torchmem*.md")), ids=lambda page: page.stem)
def test_a_page_answers_the_four_questions(page: Path) -> None:
    """What it means, how to confirm, what to do, how to verify; its links lead to pages that exist."""
    text = page.read_text()

    assert text.startswith(f"# {page.stem}\n")
    assert ["What it means.", "Confirm.", "Do.", "Verify."] == re.findall(
        r"^\*\*(.+?)\*\*", text, re.MULTILINE
    )
    assert all((BOOKS / link).exists() for link in re.findall(r"\]\((\w+\.md)\)", text))


@pytest.mark.parametrize(("page", "query"), queries())
def test_a_query_asks_for_what_exists(page: str, query: str) -> None:
    """It parses, and every series and label in it is in the catalogue or recorded."""
    promql_parser.parse(query)

    assert [] == promql.problems(query)


def test_the_pages_hold_queries() -> None:
    """The search above finds some on every page."""
    assert {page for page, _ in queries()} == ALERTS - {"TorchmemExporterDown"}
