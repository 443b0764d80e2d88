"""A recorded past is in Prometheus as if it had been scraped, and evaluated, at that time."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.generate.pictures.history import History, Scrapes, prometheus
from docs.generate.pictures.recordings import END
from docs.generate.pictures.rules import Rule, alert_series, evaluate, shipped

TICKS = range(int(END - 1800) * 1000, int(END) * 1000 + 1, 10_000)
UP = (("instance", "node1:9847"), ("job", "torchmem"), ("__name__", "up"))
ACTIVE = (*UP[:2], ("pool", "large"), ("__name__", "torchmem_active_bytes"))
OF_A_RANK = {
    (*UP[:2], ("state", "running"), ("__name__", "torchmem_process_state")): 1.0,
    (*UP[:2], ("__name__", "torchmem_snapshot_in_use_bytes")): 20.0,
    (*UP[:2], ("pool", "large"), ("__name__", "torchmem_reserved_bytes")): 40.0,
}
RANK = (*UP[:2], ("__name__", "torchmem_steps_total"))


@pytest.mark.stack
def test_a_series_ends_with_the_scrape_that_lacks_it(tmp_path: Path) -> None:
    """A series that a scrape lacks has no value from then on, as after a real scrape."""
    with prometheus(tmp_path) as url:
        history = History(url)
        scrapes = Scrapes(history)
        for tick in TICKS:
            is_there = tick <= TICKS[90]
            scrapes.add(tick, {UP: 1.0, **({RANK: float(tick)} if is_there else {})})
        history.flush()

        found = history.query_range("torchmem_steps_total", TICKS[0] / 1000, END, 10)
    assert [TICKS[:91]] == [range(min(points), max(points) + 1, 10_000) for _, points in found]


@pytest.mark.stack
def test_rules_and_alerts_are_evaluated_over_the_past(tmp_path: Path) -> None:
    """An exporter that is gone for 10 minutes is an alert: first pending, then firing.

    A rule whose result changes between operands of `or` has a value at every time.
    """
    with prometheus(tmp_path) as url:
        history = History(url)
        scrapes = Scrapes(history)
        for tick in TICKS:
            active = 30.0 if tick in TICKS[::3] else 10.0
            scrapes.add(tick, {UP: float(tick < TICKS[120]), ACTIVE: active, **OF_A_RANK})
        history.flush()
        evaluate(history, TICKS)

        alerts = history.query_range(
            'ALERTS{alertname="TorchmemExporterDown"}', TICKS[0] / 1000, END, 10
        )
        ((_, in_use),) = history.query_range(
            "rank:torchmem_in_use_bytes:max", TICKS[0] / 1000, END, 10
        )
    assert {tick: 30.0 if tick in TICKS[::3] else 20.0 for tick in TICKS} == in_use
    times = {labels["alertstate"]: (min(points), max(points)) for labels, points in alerts}
    assert {"pending": (TICKS[120], TICKS[131]), "firing": (TICKS[132], TICKS[-1])} == times


def test_each_rule_comes_after_those_that_it_reads() -> None:
    """No rule reads the result of a later one."""
    rules = shipped()
    for number, rule in enumerate(rules):
        later = {other.name for other in rules[number + 1 :]} - {rule.name}
        assert rule.reads & later == set()


def test_an_alert_starts_again_after_a_gap() -> None:
    """The wait of an alert starts again when its condition was not met in between."""
    rule = Rule("Full", "", {}, is_alert=True, hold_seconds=20)
    ticks = range(0, 80_000, 10_000)
    values = dict.fromkeys((0, 10_000, 30_000, 40_000, 50_000, 60_000), 1.0)

    series = {
        labels.get("alertstate", labels["__name__"]): points
        for labels, points in alert_series(rule, {}, values, ticks)
    }

    assert set(series["firing"]) == {50_000, 60_000}
    assert set(series["pending"]) == {0, 10_000, 30_000, 40_000}
    assert series["ALERTS_FOR_STATE"] == {
        **dict.fromkeys((0, 10_000), 0.0),
        **dict.fromkeys((30_000, 40_000, 50_000, 60_000), 30.0),
    }
