"""Every alert has a runbook, and the queries in the runbooks are valid."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
from support import promql
from support.reports import BY_NAME, STRANDED

from torchmem.explain.remedies import remedies
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.sample import OOM_CAUSES
from torchmem.sample.xids import APPLICATION_XIDS, XIDS

BOOKS = promql.ROOT / "docs" / "runbooks"
ALERTS = {rule["alert"] for rule in promql.rules("alert")}
# A series, or a function or an aggregation of one. Shell commands do not match.
QUERY = re.compile(r"((\w+:)?(torchmem|nvml)_\w+(:\w+)?|\w+[ (]+.*(torchmem|nvml)_\w+)[^#]*")


def queries() -> list[tuple[str, str]]:
    """Return page and PromQL of every indented line that is a query."""
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


def test_every_alert_has_a_runbook() -> None:
    """Every alert has a runbook and a row in docs/alerts.md, and no other page exists."""
    pages = {page.stem for page in BOOKS.glob("Torchmem*.md")}

    assert pages == ALERTS
    alerts = (promql.ROOT / "docs" / "alerts.md").read_text()
    assert pages == set(re.findall(r"\(runbooks/(Torchmem\w+)\.md\)", alerts))


@pytest.mark.parametrize("page", sorted(BOOKS.glob("Torchmem*.md")), ids=lambda page: page.stem)
def test_a_runbook_has_four_sections(page: Path) -> None:
    """A runbook has a summary and four sections, and its links are valid."""
    text = page.read_text()

    assert re.match(rf"# {page.stem}\n\n[A-Z].*\.\n\n", text)
    assert re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE) == [
        "What it means.",
        "Confirm.",
        "Do.",
        "Verify.",
    ]
    assert all((BOOKS / link).exists() for link in re.findall(r"\]\((\w+\.md)\)", text))


@pytest.mark.parametrize(("page", "query"), queries())
def test_a_query_is_valid(page: str, query: str) -> None:
    """A query parses, and every series and label in it is in the catalog or recorded."""
    promql_parser.parse(query)

    assert promql.problems(query) == []


def test_every_runbook_has_queries() -> None:
    """Every runbook has queries, except the one for an exporter that is down."""
    assert {page for page, _ in queries()} == ALERTS - {"TorchmemExporterDown"}


def test_the_xid_runbook_has_every_xid() -> None:
    """The table of TorchmemGpuXid has every XID that can fire the alert, with its explanation."""
    text = (BOOKS / "TorchmemGpuXid.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|", text, re.MULTILINE))

    expected = {
        str(number): xid.meaning for number, xid in XIDS.items() if number not in APPLICATION_XIDS
    }
    assert rows == expected


def test_the_oom_runbook_has_the_remedy_of_every_cause() -> None:
    """The table of TorchmemOutOfMemory has the first advice of a usual OOM of each cause."""
    text = (BOOKS / "TorchmemOutOfMemory.md").read_text()

    rows = dict(re.findall(r"^\| (\w+) \| .*? \| (.*?) \|$", text, re.MULTILINE)[1:])
    usual = {cause: BY_NAME.get(cause, STRANDED) for cause in OOM_CAUSES}
    kinds = {cause: remedies(report)[0].kind for cause, report in usual.items()}
    assert rows == {cause: REMEDY_WORDS[kind] for cause, kind in kinds.items() if kind}
