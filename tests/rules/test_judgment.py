"""An alert that is the judgment of a rank fires when that has held for its `for`, and only then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from support.samples import full_sample
from support.scrape_target import serving
from support.stack import Prometheus, prometheus

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.threat_series import judged_families
from torchmem.explain.thresholds import changed, defaults
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import State

LIMITS = defaults().limits("night", "node1")
LEAK = Growth("kept", 8 * MIB, 40, GIB, "held", is_leak=True)
FOR_SECONDS = 4
BRIEF_SECONDS = 2
"""For how long a judgment holds that should not fire, and for how long it is gone then."""
THRESHOLDS = changed(
    {"leak_for": f"{FOR_SECONDS}s", "leak_keep_firing_for": "1s"}, "the thresholds of this test"
)
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

    def collect(self) -> Iterator[Metric]:
        """Yield what an exporter serves of them now."""
        is_brief = time.monotonic() % (2 * BRIEF_SECONDS) < BRIEF_SECONDS
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
    often = f'count_over_time(ALERTS{{{_LEAK},rank="{BRIEF}"}}[5m]) > {4 * FOR_SECONDS}'
    with (
        serving(lambda: generate_latest(_Ranks()).decode()) as address,
        prometheus(tmp_path_factory.mktemp("judgment"), address, thresholds=THRESHOLDS) as server,
    ):
        yield server.when(lambda then: then.query(often))


_LEAK = 'alertname="TorchmemMemoryLeak"'


def _ranks(past: Prometheus, state: str) -> dict[int, float]:
    """Return how often the alert was evaluated in a state, by rank."""
    found = past.query(f'count_over_time(ALERTS{{{_LEAK},alertstate="{state}"}}[5m])')
    return {int(each["metric"]["rank"]): float(each["value"][1]) for each in found}


@pytest.mark.stack
def test_it_fires_for_what_has_held(past: Prometheus) -> None:
    """Of ranks that leak, leak now and then, grow, do not, and have ended, the first one fires."""
    assert {*_ranks(past, "firing")} == {STEADY}


@pytest.mark.stack
def test_it_is_pending_for_its_duration(past: Prometheus) -> None:
    """It fires neither before nor long after the judgment has held for the `for` of the rule."""
    pending = _ranks(past, "pending")
    assert {*pending} == {STEADY, BRIEF}
    assert abs(pending[STEADY] - FOR_SECONDS) <= 1


@pytest.mark.stack
def test_the_message_is_what_the_page_says(past: Prometheus) -> None:
    """The summary is the sentence of the page with the numbers of the series."""
    (alert,) = [
        each
        for each in past.alerts()
        if each["labels"]["alertname"] == "TorchmemMemoryLeak"
        and each["labels"]["rank"] == str(STEADY)
    ]
    summary = alert["annotations"]["summary"]
    assert "memory leak: tensors kept between steps grow by 8MiB a step" in summary
