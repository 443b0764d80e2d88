"""Every screen that shows an OutOfMemoryError says the same verdict about it."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from support.reports import BY_NAME

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import encode
from torchmem.mcp.local import LocalNode
from torchmem.node import words
from torchmem.node.why import oom_why
from torchmem.pages import oom as page
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.why.node_answers import NodeTools
from torchmem.why.oom import OomList, document


def _words(shown: str) -> str:
    return " ".join(shown.split())


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_verdict_is_the_same_on_all_screens(name: str, tmp_path: Path) -> None:
    """The list, the explanation, its page, the live page and an assistant use one sentence."""
    report, folder = BY_NAME[name], tmp_path / "0"
    folder.mkdir(mode=0o700)
    path = folder / f"1-2-3-1{REPORT_SUFFIX}"
    path.write_bytes(encode(report))
    listed = NodeTools(LocalNode(tmp_path)).oom_reports()
    said = headline(report)

    assert f"{said}." in _words(OomList([(path, report)]).words())
    assert _words(words.oom_page(path, report, {})).startswith(f"{said}.")
    assert said in _words(html.unescape(page.page(path, report, {}).decode()))
    assert said == document(report)["verdict"]["headline"]
    assert said == oom_why(report, None, may_look=True).summary
    assert f"{said}." in _words(listed.text)
    assert [said] == [each["headline"] for each in listed.data["reports"]]
