"""The row of the dashboard "Training memory" that compares two runs, before and after a change.

One run is selected in the variable `run`, the other one in `compare`.
"""

from __future__ import annotations

from dashboards import recorded
from dashboards.panels import Column, Panel, Query, Unit, joined_table, lines
from dashboards.queries import RUN_ROW, row, select

from torchmem.metrics.catalog import MetricSpec

SELECTED, COMPARED, BOTH = '"$run"', '"$compare"', '"$run|$compare"'


def _of_runs(spec: MetricSpec, runs: str) -> str:
    return select(spec).replace(SELECTED, runs)


def _over_range(function: str, spec: MetricSpec, *, aggregation: str = "max") -> str:
    """Return one value for each of both runs over the time range, and their difference."""

    def value(runs: str) -> str:
        return f"{function}({_of_runs(spec, runs)}[$__range])"

    change = f"{aggregation}({value(SELECTED)}) - {aggregation}({value(COMPARED)})"
    named = f'label_replace({change}, "run", "{CHANGE}", "", "")'
    return f"{aggregation} by (run) ({value(BOTH)}) or {named}"


CHANGE = "change"


def _table() -> Panel:
    retries = f"60 * ({_over_range('max_over_time', recorded.RUN_RETRIES)})"
    ooms = _over_range("max_over_time", recorded.RUN_OOMS, aggregation="sum")
    columns = [
        Column("Run", label="run", width=200),
        Column(
            "Fullest GPU",
            _over_range("max_over_time", recorded.RUN_RESERVED_MAX),
            unit=Unit.BYTES,
        ),
        Column("Slack at peak", _over_range("last_over_time", recorded.RUN_SLACK), unit=Unit.RATIO),
        Column(
            "Most stranded",
            _over_range("max_over_time", recorded.RUN_STRANDED_RATIO),
            unit=Unit.RATIO,
        ),
        Column(
            "Least headroom",
            _over_range("min_over_time", recorded.RUN_HEADROOM, aggregation="min"),
            unit=Unit.BYTES,
        ),
        Column("Retries", retries, unit=Unit.PER_MINUTE),
        Column("OOMs", ooms),
        Column("Step", _over_range("avg_over_time", recorded.RUN_STEP), unit=Unit.SECONDS),
    ]
    table = joined_table("Before and after", columns)
    table.description(
        "How do two runs differ over the whole time range? Select the run before the change above, "
        "under Compare with run; the time range must contain both. The row change is the selected "
        "run minus the compared one. Fullest GPU: the most that one rank has reserved. Retries are "
        "those of the worst minute, OOMs those of the worst hour; a step is the mean."
    ).no_value("No run matches the selection")
    return table.height(5).min_width(80)


def _both(title: str, question: str, spec: MetricSpec, unit: str) -> Panel:
    query = Query(row(RUN_ROW, _of_runs(spec, BOTH)), "{{run}}")
    return lines(title, query, unit).description(question)


PANELS: list[Panel] = [
    _table(),
    _both(
        "Reserved by run",
        "How much of its fullest GPU does each of the two runs reserve?",
        recorded.RUN_RESERVED_MAX,
        Unit.BYTES,
    ),
    _both(
        "Step duration by run",
        "How long are the steps of the two runs?",
        recorded.RUN_STEP,
        Unit.SECONDS,
    ),
]
