"""The row of the dashboard "Training memory" that compares two runs, before and after a change.

One run is selected in the variable `run`, the other one in `compare`.
"""

from __future__ import annotations

from dashboards import recorded
from dashboards.panels import (
    Column,
    Panel,
    Query,
    Text,
    Unit,
    joined_table,
    lines,
    stat_panel,
)
from dashboards.queries import (
    RUN_ROW,
    row,
    select,
)

from torchmem.sample.catalog import MetricSpec

INSTRUCTIONS = (
    "Select one run, and under Compare with run the run before the change; the time range must "
    "contain both."
)
EMPTY = "Select a run to compare with"

SELECTED, COMPARED, BOTH = '"$run"', '"$compare"', '"$run|$compare"'


def _of_runs(spec: MetricSpec, runs: str) -> str:
    return select(spec).replace(SELECTED, runs)


def _over_range(function: str, spec: MetricSpec) -> str:
    """Return one value for each of both runs over the time range."""
    return row(RUN_ROW, f"{function}({_of_runs(spec, BOTH)}[$__range])")


def _change(title: str, question: str, unit: str, function: str, spec: MetricSpec) -> Panel:
    text = Text(title, f"{question} The selected run minus the compared run. {INSTRUCTIONS}", EMPTY)
    selected, compared = (
        f"max({function}({_of_runs(spec, runs)}[$__range]))" for runs in (SELECTED, COMPARED)
    )
    return stat_panel(text, Query(f"{selected} - {compared}"), unit).span(6)


def _table() -> Panel:
    text = Text(
        "Both runs",
        f"How do the two runs differ over the whole time range? {INSTRUCTIONS}",
        "No run matches the selection",
    )
    stranded = _over_range("max_over_time", recorded.RUN_STRANDED_RATIO)
    retries = f"60 * {_over_range('max_over_time', recorded.RUN_RETRIES)}"
    ooms = f"sum by (run) (max_over_time({_of_runs(recorded.RUN_OOMS, BOTH)}[$__range]))"
    columns = [
        Column("Run", label="run"),
        Column(
            "Reserved, fullest GPU",
            _over_range("max_over_time", recorded.RUN_RESERVED_MAX),
            unit=Unit.BYTES,
        ),
        Column(
            "Slack at peak",
            _over_range("last_over_time", recorded.RUN_SLACK),
            unit=Unit.RATIO,
            bar=True,
        ),
        Column("Most stranded", stranded, unit=Unit.RATIO, bar=True),
        Column(
            "Least headroom", _over_range("min_over_time", recorded.RUN_HEADROOM), unit=Unit.BYTES
        ),
        Column("Retries, worst minute", retries, unit=Unit.PER_MINUTE),
        Column("OOMs, worst hour", ooms),
        Column("Step, mean", _over_range("avg_over_time", recorded.RUN_STEP), unit=Unit.SECONDS),
    ]
    return joined_table(text, columns).height(6)


def _both(spec: MetricSpec) -> list[Query]:
    return [Query(row(RUN_ROW, _of_runs(spec, BOTH)), "{{run}}")]


OVER_TIME: list[Panel] = [
    lines(
        Text(
            "Reserved, both runs",
            f"How much of its fullest GPU does each run reserve over time? {INSTRUCTIONS}",
            EMPTY,
        ),
        _both(recorded.RUN_RESERVED_MAX),
        Unit.BYTES,
    ),
    lines(
        Text(
            "Step duration, both runs",
            f"How long are the steps of each run? {INSTRUCTIONS}",
            EMPTY,
        ),
        _both(recorded.RUN_STEP),
        Unit.SECONDS,
    ),
]

PANELS: list[Panel] = [
    _change(
        "Reserved, change",
        "Does the run reserve more or less of its fullest GPU?",
        Unit.BYTES,
        "max_over_time",
        recorded.RUN_RESERVED_MAX,
    ),
    _change(
        "Slack at the peak, change",
        "Does it waste more or less of what it reserves?",
        Unit.RATIO,
        "last_over_time",
        recorded.RUN_SLACK,
    ),
    _change(
        "Least headroom, change",
        "Is there more or less headroom?",
        Unit.BYTES,
        "min_over_time",
        recorded.RUN_HEADROOM,
    ),
    _change(
        "Step duration, change",
        "Is it faster or slower?",
        Unit.SECONDS,
        "avg_over_time",
        recorded.RUN_STEP,
    ),
    _table(),
    *OVER_TIME,
]
