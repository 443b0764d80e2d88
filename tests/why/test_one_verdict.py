"""Every screen that shows an OutOfMemoryError, or what threatens a rank, says the same about it.

`test_one_verdict_in_prometheus.py` has the screens that read series.
"""

from __future__ import annotations

import html
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.reports import BARE, BY_NAME, STRANDED
from support.samples import full_sample
from support.threatened import LIMITS, LIVING
from support.words import oom_html, oom_text, rank_html, rank_text

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.explain.headline import headline
from torchmem.explain.oom_report import encode
from torchmem.explain.remedies import remedies
from torchmem.explain.run_summary import SUMMARY_SUFFIX, summarize
from torchmem.explain.run_summary import encode as encoded
from torchmem.explain.threat_series import judgment
from torchmem.explain.threats import advice, threats
from torchmem.explain.traceback_note import note_lines
from torchmem.exporter.collect import Exporter
from torchmem.exporter.sample_files import RunDirectory
from torchmem.node.published import Published
from torchmem.node.state import GpuState, RankState, RankWhy
from torchmem.node.summaries import steps_since
from torchmem.node.why import oom_why, rank_why
from torchmem.run.closing_lines import lines as closing_lines
from torchmem.sample.run_directory import REPORT_SUFFIX, SAMPLE_SUFFIX
from torchmem.sample.sample import Steps
from torchmem.sample.sample import encode as encode_sample
from torchmem.top.reading import rank_lines, verdict_lines
from torchmem.why.local import LocalNode
from torchmem.why.node_answers import NodeTools

DIED, RUNS = RankState(state="oom"), RankState(state="running")


def _words(shown: str) -> str:
    return " ".join(shown.split())


@pytest.mark.parametrize("is_over", [False, True], ids=["runs", "ended"])
def test_all_screens_say_that_the_process_went_on(tmp_path: Path, *, is_over: bool) -> None:
    """With the steps since the error, by the sample or the summary beside the report."""
    sample = replace(full_sample(), process=STRANDED.process, steps=Steps(STRANDED.steps.count + 7))
    folder = tmp_path / "0"
    folder.mkdir(mode=0o700)
    path = folder / f"1-2-3-1{REPORT_SUFFIX}"
    report = replace(STRANDED, survived=True)
    path.write_bytes(encode(report))
    if is_over:
        (folder / f"1-2-3{SUMMARY_SUFFIX}").write_bytes(encoded(summarize(sample, "exited")))
    else:
        (folder / f"1-2-3{SAMPLE_SUFFIX}").write_bytes(encode_sample(sample))
    said = "went on: 7 steps ended after it."

    assert said in _words(oom_text(report, path))
    assert said in _words(html.unescape(oom_html(path, report).decode()))
    assert said in LocalNode(tmp_path).explain(str(path)).oom.reason
    assert said not in _words(oom_text(STRANDED, path))


def test_a_sample_of_another_process_tells_nothing(tmp_path: Path) -> None:
    """A later process may have the same name in another container."""
    path = tmp_path / f"1-2-3-1{REPORT_SUFFIX}"
    (tmp_path / f"1-2-3{SAMPLE_SUFFIX}").write_bytes(encode_sample(full_sample()))

    assert steps_since(path, STRANDED) is None


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_verdict_is_the_same_on_all_screens(name: str, tmp_path: Path) -> None:
    """The list, the explanation, its page, the live page, an assistant, the traceback, and the last
    lines of `torchmem run` use one sentence, and those that advise begin with the same advice.
    """
    report, folder = BY_NAME[name], tmp_path / "0"
    folder.mkdir(mode=0o700)
    path = folder / f"1-2-3-1{REPORT_SUFFIX}"
    path.write_bytes(encode(report))
    listed = NodeTools(LocalNode(tmp_path)).oom_reports()
    said = headline(report)

    assert _words(oom_text(report, path)).startswith(f"{said}.")
    assert said in _words(html.unescape(oom_html(path, report).decode()))
    assert said == NodeTools(LocalNode(tmp_path)).most_urgent().data["headline"]
    assert said == oom_why(report, None, may_look=True).summary
    assert f"{said}." in _words(listed.text)
    assert [said] == [each["headline"] for each in listed.data["reports"]]
    assert note_lines(report, path)[0] == said
    died = replace(full_sample(), process=report.process, devices=(report.device,), ended="oom")
    closing = _words(" ".join(closing_lines(died, report, tmp_path)))
    assert f"{said[0].lower()}{said[1:]}" in closing or report is BARE  # whose peak is unknown


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_first_advice_is_the_same_on_all_screens(name: str, tmp_path: Path) -> None:
    """The explanation, its page, the live page and an assistant advise the same first."""
    report, folder = BY_NAME[name], tmp_path / "0"
    folder.mkdir(mode=0o700)
    path = folder / f"1-2-3-1{REPORT_SUFFIX}"
    path.write_bytes(encode(report))
    first = next(iter(remedies(report)), None)
    if first is None:
        return
    text = _words(first.text)

    assert f"1. {text}" in _words(oom_text(report, path))
    shown = _words(html.unescape(oom_html(path, report).decode()))
    advised = [shown.find(_words(each.text)) for each in remedies(report)]
    assert advised[0] >= 0
    assert advised[0] == min(place for place in advised if place >= 0)
    of_page = oom_why(report, None, may_look=True)
    answer = RankWhy(oom=of_page)
    opened = _words(" ".join(rank_lines(GpuState(), DIED, answer, None, 80)))
    brief = _words(" ".join(verdict_lines(DIED, answer, 80)))
    assert f"Verdict: {headline(report)}." in opened
    assert brief.startswith(f"Verdict: {headline(report)}. 1. {text}")
    assert f"1. {text}" in opened
    assert _words(oom_why(report, None, may_look=True).advice[0].text).startswith(text)
    explained = LocalNode(tmp_path).explain(str(path)).oom
    assert _words(explained.advice[0].text).startswith(text)


@pytest.mark.parametrize("kind", sorted(LIVING))
def test_what_threatens_a_rank_is_the_same_on_all_screens(kind: str, tmp_path: Path) -> None:
    """The explanation, its page, the live page and `torchmem top` begin with one threat and advice.

    So they do where the rank has survived an OutOfMemoryError, and series have the same.
    """
    sample = replace(LIVING[kind], timestamp=time.time())
    (device,) = sample.devices
    threat, first = threats(sample, device, LIMITS)[0], advice(sample, device, LIMITS)[0]
    item = Published(sample, 1000, "running", attributed=True)
    with closing(Exporter(FakeNvml.of(), RunDirectory(tmp_path))) as exporter:
        exporter.collect()
        found = exporter.found()
    why = rank_why(found, item, device, may_look=True)
    survivor = replace(why, oom=oom_why(STRANDED, None, may_look=True))
    text, advised = _words(threat.text), _words(first.text)

    explained = _words(rank_text(sample, time.time()))
    assert f"- {text}" in explained
    assert f"1. {advised}" in explained
    shown = _words(html.unescape(rank_html(sample, time.time()).decode()))
    assert shown.index(text) < shown.index(advised)
    for answer in (why, survivor):
        assert answer.threats[0].text == threat.text
        assert _words(answer.advice[0].text).startswith(advised)
        listed = _words(" ".join(rank_lines(GpuState(), RUNS, answer, None, 80)))
        assert listed.index(text) < listed.index(f"1. {advised}")
        assert _words(" ".join(verdict_lines(RUNS, answer, 80))).startswith(f"1. {advised}")
    judged = judgment(sample, device, LIMITS)
    assert judged is not None
    assert (judged.kind, judged.bytes, judged.remedy) == (kind, threat.bytes, first.kind)
