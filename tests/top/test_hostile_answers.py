"""Whatever an exporter answers, `torchmem top` and `torchmem mcp` show a page or one sentence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from support.hostile_answers import DEEP, VALUES, variants
from support.local_http import Answer, Request, answering

from torchmem.cli.exporter import AwayError, ask_rank, read
from torchmem.cli.http import HttpAnswer
from torchmem.mcp.answer import bounded
from torchmem.node.ranks import ProcessFilter
from torchmem.node.state import GpuState, RankState
from torchmem.sample.errors import TorchmemError
from torchmem.top.history import SeenHistory
from torchmem.top.reading import rank_lines
from torchmem.top.screen import Screen, drawn, page
from torchmem.why.exporter import ExporterNode
from torchmem.why.node_answers import NodeTools

HERE = Path(__file__).parent
STATE, ANSWER = (HERE / "state.json").read_bytes(), (HERE / "answer.json").read_bytes()
URL = "http://127.0.0.1:9847"


def shown(state: bytes) -> bool:
    """Draw a state; return whether it is one."""
    try:
        node = read(state)
    except AwayError:
        return False
    history = SeenHistory()
    history.add(node)
    screen, console = Screen(node, URL, history=history), Console(width=80, height=24)
    return bool(page(screen, console).plain and drawn(screen, console).plain)


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_state_has_a_page_or_is_refused(name: str) -> None:
    """No number, text or depth in the state ends the command with a traceback."""
    tried = [shown(body) for body in variants(STATE, {name: VALUES[name]})]

    assert len(tried) > 100
    assert shown(STATE)


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_answer_about_a_rank_has_a_page_or_is_none(name: str) -> None:
    """No number, text or depth in what explains a rank ends the command with a traceback."""
    for body in (*variants(ANSWER, {name: VALUES[name]}), DEEP):
        answer = ask_rank(URL, "", "", lambda _, body=body: HttpAnswer(200, None, body))  # type: ignore[misc]
        assert answer is None or rank_lines(GpuState(), RankState(), answer, 1.8e9, 80)


@pytest.mark.parametrize("hostile", ["state", "answer"])
def test_a_hostile_exporter_gives_an_assistant_an_answer_or_a_sentence(hostile: str) -> None:
    """Every tool that asks an exporter answers, or says in a sentence why not."""
    base = {"state": STATE, "answer": ANSWER}
    bodies = dict(base)

    def answer(request: Request) -> Answer:
        return Answer(
            body=bodies["state" if request.path.startswith("/api/v1/state") else "answer"]
        )

    with answering(answer) as address:
        node, any_rank = NodeTools(ExporterNode(f"http://{address}")), ProcessFilter()
        tools = (
            node.list_ranks,
            node.oom_reports,
            lambda: node.rank_report(any_rank),
            lambda: node.what_holds_memory(any_rank),
            lambda: node.explain_oom(None, any_rank),
        )
        few = {name: VALUES[name] for name in ("400 digits", "large", "surrogate", "list")}
        for number, body in enumerate(variants(base[hostile], few)):
            bodies[hostile] = body
            with suppress(TorchmemError):
                assert bounded(tools[number % len(tools)]())
