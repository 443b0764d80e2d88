"""The alerts of nodes that serve, by recordings of real engines (tests/serving): these and no more.

Each state lasts for an hour or so. The recordings are of a phantom GPU, which has no utilization:
it is added, 0 where no request comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from rules.test_scenarios import FIRED, evaluated
from serving import recordings
from serving.recordings import Recording

SCRAPE_SECONDS = 30
MINUTES = 75
"""Long enough for each alert."""
FRESH_SECONDS = 15.0
"""What is younger is renewed all the time."""


@dataclass(frozen=True)
class Case:
    """What a node goes through: states of a recording with the minute at which each begins.

    alerts: that fire in this time.
    busy: the share of the time in which kernels run.
    """

    recording: str
    states: tuple[tuple[str, int], ...]
    alerts: frozenset[str] = frozenset()
    busy: float = 0.6


ENGINE, PAIR = "vllm", "two-processes"
OUT_OF_MEMORY = "TorchmemOutOfMemory"
CANNOT_WAKE, LEAK = "TorchmemEngineCannotWake", "TorchmemEngineSleepLeak"
CASES = {
    "serving": Case(ENGINE, (("started", 0), ("served", 1), ("served long", 30))),
    "standby": Case(ENGINE, (("served long", 0),), busy=0.0),
    "beside-a-neighbor": Case(ENGINE, (("served", 0), ("beside a neighbor", 10))),
    "asleep": Case(ENGINE, (("served", 0), ("asleep 1", 10)), busy=0.0),
    "woken": Case(ENGINE, (("asleep 1", 0), ("awake 1", 10))),
    "half-awake": Case(ENGINE, (("asleep 2", 0), ("weights awake", 10))),
    "cannot-wake": Case(
        ENGINE, (("asleep 2", 0), ("asleep beside a neighbor", 10)), frozenset({CANNOT_WAKE})
    ),
    "failed-to-wake": Case(
        ENGINE,
        (("asleep beside a neighbor", 0), ("after a failed wake-up", 2)),
        frozenset({CANNOT_WAKE, OUT_OF_MEMORY}),
    ),
    "leaking": Case(ENGINE, (("awake 2", 0), ("leaked", 10)), frozenset({LEAK})),
    "beyond-the-plan": Case(
        "vllm-beyond",
        (("within the plan", 0), ("beyond the plan", 10)),
        frozenset({"TorchmemEngineAbovePlan"}),
    ),
    "in-one-process": Case("trl", (("step 1", 0), ("step 4", 30))),
    "in-turns": Case(
        PAIR,
        (
            ("asleep", 0),
            ("the trainer has borrowed", 10),
            ("woken beside a training", 13),
            ("the trainer has cached", 40),
            ("woken beside an idle trainer", 43),
        ),
    ),
    "borrowed-for-long": Case(
        PAIR, (("asleep", 0), ("the trainer has borrowed", 10)), frozenset({CANNOT_WAKE})
    ),
    "sglang": Case("sglang", (("served", 0), ("asleep", 30), ("awake", 59), ("served again", 60))),
}


def series(case: Case, node: str) -> Iterator[tuple[str, str]]:
    """Yield the series of a case on a node, with their values as promtool reads them."""
    known = recordings.read(case.recording)
    periods = list(pairwise([*case.states, ("", MINUTES)]))
    names = {each for (state, _), _ in periods for each in known[state].values}
    labels = f'{{job="torchmem",instance="{node}:9847",'
    for name in sorted(names):
        values = [_values(name, known[state], *span) for (state, *_), span in _spans(periods)]
        yield name.replace("{", labels, 1).replace(",}", "}"), " ".join(values)
    count = MINUTES * 60 // SCRAPE_SECONDS
    (gpu,) = {label for name in names for label in re.findall(r'gpu="0",.*?(uuid="[^"]+")', name)}
    utilization = f'nvml_utilization_ratio{labels}gpu="0",{gpu},engine="gpu"}}'
    yield utilization, f"{case.busy}x{count}"
    yield f"up{labels}}}".replace(",}", "}"), f"1x{count}"


def _spans(
    periods: list[tuple[tuple[str, int], tuple[str, int]]],
) -> Iterator[tuple[tuple[str, int], tuple[int, int]]]:
    """Yield each state with its first and its next scrape."""
    for (state, begin), (_, end) in periods:
        yield (state, begin), (begin * 60 // SCRAPE_SECONDS, end * 60 // SCRAPE_SECONDS)


def _values(name: str, page: Recording, begin: int, end: int) -> str:
    """Return the values of a series while a state lasts."""
    value, count = page.values.get(name), end - begin
    if value is None:
        return f"stale _x{count - 1}"
    if "_timestamp_seconds{" not in name:
        return f"{value!r}x{count - 1}"
    age, start = page.time - value, begin * SCRAPE_SECONDS
    step = SCRAPE_SECONDS if age < FRESH_SECONDS else 0
    return f"{start - age:.0f}+{step}x{count - 1}"


@pytest.mark.stack
def test_each_state_fires_its_alerts_and_no_others(tmp_path: Path) -> None:
    """A healthy engine raises nothing; every alert on a serving node has a state that fires it."""
    inputs = [each for name, case in CASES.items() for each in series(case, name)]

    output = evaluated(inputs, [FIRED], tmp_path, MINUTES * 60.0, SCRAPE_SECONDS)

    fired = re.findall(r'\{alertname="(\w+)".*? instance="([\w-]+):9847"', output)
    assert {name: case.alerts for name, case in CASES.items()} == {
        name: {alert for alert, node in fired if node == name} for name in CASES
    }
    assert len(fired) == output.count('{alertname="')
