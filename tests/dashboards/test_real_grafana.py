"""The boards in a real Grafana, where there is one: docs/dashboards.md says how to provide it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from docs.generate.pictures.drawing import missing
from docs.generate.pictures.real_grafana import DATASOURCE, Grafana, Json, absent, grafana
from docs.generate.pictures.recorder import BUILD, recorded, served
from support.dashboards import BOARDS, PANELS
from support.local_http import Answer, Request, answering

UIDS = [board["uid"] for board in BOARDS.values()]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grafana]:
    """A Grafana with the boards, in front of a Prometheus that holds a recording."""
    if reason := absent() or missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("grafana")
    with ExitStack() as stack:
        prometheus = stack.enter_context(served(recorded(["restarts"])["restarts"]))
        yield stack.enter_context(grafana(prometheus, list(BOARDS.values()), folder))


@pytest.mark.stack
def test_grafana_has_every_board(real: Grafana) -> None:
    """Every board is there, with all its panels, and provisioning complains of nothing."""
    for board in BOARDS.values():
        found = real.ask(f"/api/dashboards/uid/{board['uid']}")
        assert len(board["panels"]) == len(found["dashboard"]["panels"]), board["title"]
    assert real.complaints() == []


@pytest.mark.stack
def test_grafana_answers_the_queries_of_every_panel(real: Grafana) -> None:
    """No query of any panel fails in Grafana's own data source."""
    errors = {name: real.errors(panel) for name, panel in PANELS.items()}

    assert {name: found for name, found in errors.items() if found} == {}


@pytest.mark.stack
def test_grafana_draws_every_board(real: Grafana) -> None:
    """Each board has a screenshot, in build/pictures/grafana."""
    folder = BUILD / "grafana"
    folder.mkdir(parents=True, exist_ok=True)

    assert all(picture.stat().st_size for picture in real.shoot(UIDS, folder))


def test_a_query_that_fails_in_grafana_is_found() -> None:
    """A query with an error and a query without an answer are reported, each by its letter."""
    targets = [{"refId": letter, "expr": 'up{job=~"$job"}'} for letter in "ABC"]
    asked: list[Json] = []

    def answer(request: Request) -> Answer:
        asked.append(json.loads(request.body))
        results = {"A": {"error": "parse error", "status": 400}, "B": {"status": 200, "frames": []}}
        return Answer(207, json.dumps({"results": results}).encode())

    with answering(answer) as address:
        errors = Grafana(f"http://{address}").errors({"targets": targets})

    assert errors == ["A: parse error", "C: no answer"]
    queries = asked[-1]["queries"]
    assert {query["expr"] for query in queries} == {'up{job=~".*"}'}
    assert {query["datasource"]["uid"] for query in queries} == {DATASOURCE}
