"""An alert that is the judgment of a rank fires when that has held for its `for`, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from support.samples import full_sample
from support.scrape_target import serving
from support.stack import Prometheus, prometheus
from support.waiting import until

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.threat_series import judged_families
from torchmem.explain.thresholds import changed, defaults
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import State

LIMITS = defaults().limits("night", "node1")
LEAK = Growth("kept", 8 * MIB, 40, GIB, "held", is_leak=True)
FOR_SECONDS = 6
BRIEF_SCRAPES = 2
"""In how many scrapes a judgment holds that should not fire, and in how many it is gone then."""
THRESHOLDS = changed(
    {"leak_for": f"{FOR_SECONDS}s", "leak_keep_firing_for": "1s"}, "the thresholds of this test"
)
EVALUATIONS = 10
"""In how many the alert has been pending for a brief judgment."""
STEADY, BRIEF, OTHER, CALM, ENDED = range(5)


def _view(rank: int, growth: Growth | None, state: State = "running") -> ProcessView:
    sample = full_sample(rank)
    device = replace(sample.devices[0], growth=growth)
    assert device.layout is not None
    layout = replace(device.layout, stranded_bytes=0)
    sample = replace(sample, devices=(replace(device, layout=layout, driver_free_bytes=20 * GIB),))
    return ProcessView(sample, 1000 + rank, state, {})


class _Ranks:
    """Ranks that leak, leak now and then, grow without a leak, do not grow, or have ended."""

    def __init__(self) -> None:
        self._scrapes = count()

    def collect(self) -> Iterator[Metric]:
        """Yield what an exporter serves of them in a scrape."""
        is_brief = next(self._scrapes) % (2 * BRIEF_SCRAPES) < BRIEF_SCRAPES
        views = [
            _view(STEADY, LEAK),
            _view(BRIEF, LEAK if is_brief else None),
            _view(OTHER, replace(LEAK, is_leak=False)),
            _view(CALM, None),
            _view(ENDED, LEAK, "oom"),
        ]
        yield from families(views)
        yield from judged_families(views, lambda _: LIMITS)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus in which brief judgments have come and gone several times."""
    often = f'count_over_time(ALERTS{{{_LEAK},rank="{BRIEF}"}}[5m]) > {EVALUATIONS}'
    ranks = _Ranks()
    with (
        serving(lambda: generate_latest(ranks).decode()) as address,
        prometheus(tmp_path_factory.mktemp("judgment"), address, thresholds=THRESHOLDS) as server,
    ):
        yield server.when(lambda then: then.query(often))


_LEAK = 'alertname="TorchmemMemoryLeak"'


def _ranks(past: Prometheus, state: str) -> dict[int, list[float]]:
    """Return the times of the evaluations in which the alert had a state, by rank."""
    found = past.query(f'ALERTS{{{_LEAK},alertstate="{state}"}}[5m]')
    return {int(each["metric"]["rank"]): [at for at, _ in each["values"]] for each in found}


@pytest.mark.stack
def test_it_fires_for_what_has_held(past: Prometheus) -> None:
    """Of ranks that leak, leak now and then, grow, do not, and have ended, the first one fires."""
    assert {*_ranks(past, "firing")} == {STEADY}


@pytest.mark.stack
def test_it_is_pending_for_its_duration(past: Prometheus) -> None:
    """It fires from the first evaluation in which the judgment has held for the rule's `for`."""
    pending, fired = _ranks(past, "pending"), _ranks(past, "firing")[STEADY][0]
    assert {*pending} == {STEADY, BRIEF}
    # When it became pending: after a scrape that failed, it does so again.
    (since,) = past.query(f'ALERTS_FOR_STATE{{{_LEAK},rank="{STEADY}"}}[5m]')
    begun = dict(since["values"])
    waited = [at for at in pending[STEADY] if begun[at] == begun[fired]]
    assert waited[-1] < waited[0] + FOR_SECONDS <= fired


@pytest.mark.stack
def test_the_message_is_what_the_page_says(past: Prometheus) -> None:
    """The summary is the sentence of the page with the numbers of the series."""

    def alerts() -> list[dict[str, Any]]:
        return [
            each
            for each in past.alerts()
            if each["labels"]["alertname"] == "TorchmemMemoryLeak"
            and each["labels"]["rank"] == str(STEADY)
        ]

    (alert,) = until(alerts)
    summary = alert["annotations"]["summary"]
    assert "memory leak: tensors kept between steps grow by 8MiB a step" in summary
