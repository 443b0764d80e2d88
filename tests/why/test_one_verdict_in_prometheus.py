"""Alerts, dashboards and the fleet's report say what the report of a rank says first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from support.dashboards import QUERIES, filled_in
from support.reports import BY_NAME
from support.samples import full_sample
from support.scrape_target import serving
from support.stack import Prometheus, prometheus
from support.threatened import LIMITS, LIVING, device_of

from torchmem.explain.headline import ONSET_SUMMARIES
from torchmem.explain.oom_report import CAUSE_SUMMARIES, OomReport
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy
from torchmem.explain.threat_series import judged_families
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import changed
from torchmem.fleet.reading import StoreReader
from torchmem.fleet.report import report, saved_by
from torchmem.fleet.store import Store, Window
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.sample import Sample

TRAINING = "training-memory: Ranks with the least headroom"
pytestmark = pytest.mark.stack

STARTED = time.time()
DURATIONS = ("fragmentation_for", "near_capacity_for", "leak_for")
ALERTS = {
    "fragmentation": "TorchmemFragmentationHigh",
    "leak": "TorchmemMemoryLeak",
    "capacity": "TorchmemNearCapacity",
    "external": "TorchmemNearCapacity",
}
"""The alerts that are the judgment of a living rank, without one that needs half an hour."""


def _words(shown: str) -> str:
    return " ".join(shown.split())


def _said(first: Remedy | None) -> str:
    """Return the first advice in the words of series; empty if there is none."""
    return REMEDY_WORDS[first.kind] if first and first.kind else ""


def _advised(died: OomReport) -> str:
    return _said(next(iter(remedies(died)), None))


def _dead(number: int, name: str) -> Sample:
    """Return the last sample of a rank that died with this report."""
    died = BY_NAME[name]
    first = next(iter(remedies(died)), None)
    oom = replace(died.oom, timestamp=STARTED, remedy=first.kind if first else None)
    counters = replace(died.device.counters, ooms={oom.cause: 1})
    device = replace(died.device, uuid=f"GPU-{name}", last_oom=oom, counters=counters)
    return _sample(replace(full_sample(), devices=(device,), ended="oom"), name, number)


def _sample(sample: Sample, name: str, number: int) -> Sample:
    device = replace(device_of(sample), uuid=f"GPU-{name}")
    process = replace(sample.process, run=name, pid=number, rank=0, start_timestamp=STARTED)
    return replace(sample, timestamp=time.time(), process=process, devices=(device,))


def _flushing(sample: Sample) -> Sample:
    """Return a rank whose allocator has flushed its cache once more each second."""
    (device,) = sample.devices
    counters = replace(device.counters, alloc_retries=int(time.time() - STARTED))
    return replace(sample, devices=(replace(device, counters=counters),))


class _Node:
    """Ranks that have died, and ranks that are threatened."""

    def collect(self) -> Iterator[Metric]:
        """Yield what an exporter serves of them now."""
        names = sorted(BY_NAME)
        dead = [_dead(number, name) for number, name in enumerate(names, 100)]
        living = [
            _flushing(_sample(sample, f"living-{kind}", number))
            for number, (kind, sample) in enumerate(LIVING.items(), 200)
        ]
        views = [ProcessView(sample, sample.process.pid, "oom", {}) for sample in dead]
        views += [ProcessView(sample, sample.process.pid, "running", {}) for sample in living]
        yield from families(views)
        yield from judged_families(views, lambda _: LIMITS)


OOMS = "oom: Ranks that ran out of memory or were killed", "onset, remedy"
"""A panel, and a part of its query."""


@dataclass(frozen=True, slots=True)
class _Store:
    """A Prometheus, and its alerts that fire, by run and name."""

    server: Prometheus
    alerts: Mapping[tuple[str, str], dict[str, Any]]

    def board(self, panel: str, told: str, run: str = ".*") -> dict[str, dict[str, str]]:
        """Return the labels of each run by the first query of a panel with this text in it."""
        rows = self.server.query(_query(panel, told, run))
        return {row["metric"]["run"]: row["metric"] for row in rows}


def _query(panel: str, told: str, run: str = ".*") -> str:
    found = (text for name, text in QUERIES.items() if name.startswith(panel) and told in text)
    return filled_in(next(found), run=run)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Store]:
    """A Prometheus that has judged these ranks, with short durations of its alerts."""
    thresholds = changed(dict.fromkeys(DURATIONS, "1s"), "the thresholds of this test")
    folder = tmp_path_factory.mktemp("verdicts")
    names = f"TorchmemOutOfMemory|{'|'.join({*ALERTS.values()})}"
    firing = f'count(count by (run) (ALERTS{{alertname=~"{names}",alertstate="firing"}}))'
    with (
        serving(lambda: generate_latest(_Node()).decode()) as address,
        prometheus(folder, address, thresholds=thresholds) as server,
    ):

        def is_complete(then: Prometheus) -> bool:
            """Return whether all alerts fire, and boards show what they read of other groups."""
            shown = {row["metric"]["run"] for row in then.query(_query(*OOMS))}
            return then.value(firing) == len(BY_NAME) + len(ALERTS) and BY_NAME.keys() <= shown

        server.when(is_complete, pause=1.0)
        found = {
            (alert["labels"]["run"], alert["labels"]["alertname"]): alert
            for alert in server.alerts()
            if alert["state"] == "firing" and "run" in alert["labels"]
        }
        yield _Store(server, found)


def test_the_alert_of_an_oom(store: _Store) -> None:
    """It says the cause, the onset and the first advice of the report."""
    for name, died in BY_NAME.items():
        alert = store.alerts[name, "TorchmemOutOfMemory"]
        text = _words(alert["annotations"]["description"])
        assert alert["labels"]["cause"] == died.oom.cause
        assert CAUSE_SUMMARIES[died.oom.cause].lower() in text.lower()
        assert died.oom.onset is None or f"{ONSET_SUMMARIES[died.oom.onset]}." in text
        assert _advised(died) in text


def test_the_board_of_an_oom(store: _Store) -> None:
    """Its table has cause, onset, first advice and bytes of each report, as Training memory has."""
    told = store.board(*OOMS)
    requested = store.server.query("torchmem_last_oom_requested_bytes")
    sizes = {row["metric"]["run"]: float(row["value"][1]) for row in requested}
    for name, died in BY_NAME.items():
        labels = told[name]
        # Of more than ten ranks that died, it shows some.
        rank = store.board(TRAINING, '"remedy", "–"', run=name)[name]
        assert (labels["cause"], labels.get("onset")) == (died.oom.cause, died.oom.onset)
        assert labels.get("remedy", "") == rank.get("remedy", "") == _advised(died)
        assert rank["threat"] == died.oom.cause
        assert sizes.get(name) == died.oom.requested_bytes


def test_the_report_of_a_fleet(store: _Store) -> None:
    """It names the first advice of each run that ended, and its cause and onset."""
    whole_minute = int(time.time()) // 60 * 60 + 60
    past = StoreReader(Store(store.server.url), Window(whole_minute - 3600, whole_minute)).past()
    ended = {ending.run: ending for ending in report(past).endings}
    board = store.server.query(filled_in(QUERIES["fleet: OOMs that ended ranks, by cause A"]))
    rows = {
        tuple(row["metric"].get(label) for label in ("cause", "onset", "remedy")) for row in board
    }
    for name, died in BY_NAME.items():
        told = ended[name].cause, ended[name].onset, saved_by(ended[name])
        oom = died.oom
        assert told == (oom.cause, oom.onset, _advised(died) or None)
        assert told in rows


def test_the_alert_and_the_boards_of_a_living_rank(store: _Store) -> None:
    """They say the threat, the bytes and the first advice of its page."""
    ranks = store.board(TRAINING, '"remedy", "–"')
    fleet = store.board("fleet: Ranks with the least headroom", "launch, threat")
    for kind, sample in LIVING.items():
        (device,), run = sample.devices, f"living-{kind}"
        first = threats(sample, device, LIMITS)[0]
        said = _said(advice(sample, device, LIMITS)[0])
        assert ranks[run]["threat"] == fleet[run]["threat"] == first.kind == kind
        assert ranks[run]["remedy"] == said
        if kind in ALERTS:
            alert = store.alerts[run, ALERTS[kind]]
            assert said in _words(alert["annotations"]["description"])
            assert float(alert["value"]) == first.bytes
