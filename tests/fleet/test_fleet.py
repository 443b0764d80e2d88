"""`torchmem fleet` returns what is known exactly, from a real Prometheus and VictoriaMetrics."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fleet import END, GIB, HOUR, START, filled_prometheus, filled_victoria_metrics
from support.needs import skip_without

from torchmem.cli.main import main
from torchmem.sample.remedy_words import REMEDY_WORDS

UNTIL = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(END))
GOLDEN = Path(__file__).with_name("golden") / "prices.md"
DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
STORES = {"prometheus": filled_prometheus, "victoria-metrics": filled_victoria_metrics}


@pytest.fixture(scope="module", params=STORES)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Return the URL of a store with the three days of support.fleet."""
    skip_without(request.param)
    with STORES[request.param](tmp_path_factory.mktemp("store")) as url:
        yield url


def fleet(store: str, *flags: str) -> int:
    """Run the command over the three days."""
    return main(["fleet", "--prometheus", store, "--since", "3d", "--until", UNTIL, *flags])


@pytest.fixture
def document(store: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the report as JSON, with numbers rounded to six digits."""
    assert fleet(store, "--json") == 0
    loaded: dict[str, Any] = json.loads(
        capsys.readouterr().out, parse_float=lambda text: round(float(text), 6)
    )
    return loaded


def hours(bills: list[dict[str, Any]], name: str) -> dict[str, tuple[float, ...]]:
    """Return held, lost, stranded, idle and empty GPU-hours by run, user or team."""
    kinds = ("used", "lost", "stranded", "idle", "empty")
    return {bill[name]: tuple(bill[kind] for kind in kinds) for bill in bills}


@pytest.mark.stack
def test_gpu_hours_are_exact_by_run_user_and_team(document: dict[str, Any]) -> None:
    """Each minute counts once, and all tables add up to the same total."""
    gpt, probe = (38.5, 0.7, 1.0, 0.0, 0.0), (24.0, 0.0, 2.0, 2.0, 8.0)

    assert hours(document["by_run"], "run") == {"probe": probe, "gpt": gpt}
    assert hours(document["by_user"], "user") == {"leo": probe, "mia": gpt}
    assert hours(document["by_team"], "team") == {"speech": probe, "vision": gpt}
    assert hours([document["total"]], "run") == {"": (62.5, 0.7, 3.0, 2.0, 8.0)}
    assert document["all_gpus"] == 8 * 72
    assert (document["idle_unattributed"], document["stranded_unattributed"]) == (3.0, 0.0)


@pytest.mark.stack
def test_what_the_hours_cost_is_exact(document: dict[str, Any]) -> None:
    """Each GPU-hour costs the price of its model, also where no run or user is known."""
    gpt, probe = (96.25, 1.75, 2.5, 0.0, 0.0), (24.0, 0.0, 2.0, 2.0, 8.0)
    costs = {
        name: hours([{**bill["cost"], name: bill[name]} for bill in document[f"by_{name}"]], name)
        for name in ("run", "user", "team", "namespace")
    }

    assert costs == {
        "run": {"gpt": gpt, "probe": probe},
        "user": {"mia": gpt, "leo": probe},
        "team": {"vision": gpt, "speech": probe},
        "namespace": {"train": gpt, "dev": probe},
    }
    assert document["cost"] == {
        "currency": "EUR",
        "all_gpus": 4 * 72 * 2.5 + 4 * 72 * 1.0,
        "idle_unattributed": 3.0,
        "stranded_unattributed": 0.0,
    }
    assert document["headline"].endswith("; 19.25 of 1,008 EUR wasted")


@pytest.mark.stack
def test_csv_has_hours_and_costs_of_each_run(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per run and owner, and one for what has none, add up to the whole."""
    assert fleet(store, "--csv") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    assert [(line["run"], line["namespace"], line["currency"]) for line in lines] == [
        ("probe", "dev", "EUR"),
        ("gpt", "train", "EUR"),
        ("", "", "EUR"),
    ]
    assert sum(float(line["idle_gpu_hours"]) for line in lines) == 5.0
    assert sum(float(line["held_cost"]) for line in lines) == 120.25


@pytest.mark.stack
def test_without_a_price_no_money_is_shown(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is called a cost, and no amount is 0, if the store has no price."""
    unpriced = ("--match", 'currency=""')
    assert fleet(store, *unpriced) == 0
    text = capsys.readouterr().out
    assert fleet(store, *unpriced, "--csv") == 0
    heading = capsys.readouterr().out.partition("\n")[0]
    assert fleet(store, *unpriced, "--json") == 0
    found = json.loads(capsys.readouterr().out)

    assert "EUR" not in text
    assert "wasted" not in text
    assert heading.endswith("empty_gpu_hours")
    assert found["cost"] is None
    assert [bill["cost"] for bill in found["by_run"]] == [None, None]


@pytest.mark.stack
def test_launches_end_as_their_ranks_did(document: dict[str, Any]) -> None:
    """An OOM of one rank ended the launch; the run started again an hour later and finished."""
    endings = [
        (each["run"], each["outcome"], each["ranks"], each["gpu_hours"], each["back_seconds"])
        for each in document["endings"]
    ]
    oom = document["endings"][-1]

    assert endings == [
        ("probe", "exited", 1, 24.0, None),
        ("gpt", "exited", 2, 18.0, None),
        ("gpt", "oom", 2, 20.0, 0.5 * HOUR),
    ]
    assert (oom["cause"], oom["onset"]) == ("fragmentation", "stranded")
    assert (oom["start"], oom["end"]) == (START, START + 10.5 * HOUR)
    assert document["outcomes"] == {"exited": 2, "oom": 1}
    assert document["ooms"] == [{"cause": "fragmentation", "onset": "stranded", "launches": 1}]


@pytest.mark.stack
def test_the_setting_that_would_have_saved_a_launch_is_named(document: dict[str, Any]) -> None:
    """Fragmentation is remedied by expandable segments, which would have saved 20 GPU-hours."""
    (saving,) = document["savings"]

    assert saving == {
        "remedy": REMEDY_WORDS["expandable_segments"],
        "launches": 1,
        "gpu_hours": 20.0,
        "runs": ["gpt"],
    }


@pytest.mark.stack
def test_only_a_run_with_room_fits_a_smaller_gpu(document: dict[str, Any]) -> None:
    """A run that needs 20 of 80 GiB fits a GPU of 24 GB, or a batch of 1 + (72 - 20) / 10."""
    (fit,) = document["fits"]

    assert (fit["run"], fit["gpu"]) == ("probe", "NVIDIA GeForce RTX 4090")
    assert (fit["need_bytes"], fit["total_bytes"]) == (20 * GIB, 80 * GIB)
    assert fit["batch_factor"] == 6.2


@pytest.mark.stack
def test_the_text_is_the_recorded_one(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/fleet.md shows lines of it; record it again with WRITE_GOLDEN=1."""
    assert fleet(store) == 0
    text = DATE.sub("YYYY-MM-DD hh:mm UTC", capsys.readouterr().out)
    if "WRITE_GOLDEN" in os.environ:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)

    assert text == GOLDEN.read_text()


@pytest.mark.stack
def test_the_page_and_the_text_say_the_same(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page contains the Markdown and its tables, and no script."""
    assert fleet(store, "--html", str(tmp_path / "fleet.html")) == 0
    text, written = capsys.readouterr().out, (tmp_path / "fleet.html").read_text()

    assert "| gpt | mia | vision | 38.5 | 0.70 | 1.0 | 0 |" in text
    assert (
        "| **lost**: waiting for a rank that ran out of memory, and starting again | 0.70 |" in text
    )
    assert html.escape(text) in written
    assert "<td class=words>gpt</td><td class=words>mia</td>" in written
    assert "<script" not in written


@pytest.mark.stack
def test_matchers_restrict_the_report(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --match, only series with these labels count; without any, the error says so."""
    assert fleet(store, "--match", 'job="other"') == 2
    assert "has no series of torchmem in the last 3d" in capsys.readouterr().err
    assert fleet(store, "--match", '{job="torchmem"}') == 0
