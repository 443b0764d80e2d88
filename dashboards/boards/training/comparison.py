"""Two runs beside each other: did the change of a setting help?"""

from __future__ import annotations

from dashboards.panels import Column, Panel, Query, Text, joined_table, lines, stat_panel
from dashboards.panels.units import BYTES, PER_MINUTE, RATIO, SECONDS
from dashboards.queries import compare, recorded

from torchmem.sample.catalog import MetricSpec

HOW = "Choose one run, and above under Compare the run before the change; the time range must hold both."
EMPTY = "Choose a run to compare with"


def panels() -> list[Panel]:
    """The change in numbers, both runs in a table, and over time."""
    return [
        _change("Reserved, change", "Does the run hold more or less of its fullest GPU?", BYTES, "max_over_time",
                recorded.RUN_RESERVED_MAX),
        _change("Slack at the peak, change", "Does it waste more or less of what it reserves?", RATIO,
                "last_over_time", recorded.RUN_SLACK),
        _change("Least headroom, change", "Is there more or less room left?", BYTES, "min_over_time",
                recorded.RUN_HEADROOM),
        _change("Step duration, change", "Is it faster or slower?", SECONDS, "avg_over_time", recorded.RUN_STEP),
        _table(),
        _reserved(),
        _steps(),
    ]  # fmt: skip


def _change(title: str, question: str, unit: str, function: str, spec: MetricSpec) -> Panel:
    text = Text(title, f"{question} The chosen run minus the compared one. {HOW}", EMPTY)
    return stat_panel(text, Query(compare.change(function, spec)), unit).span(6)


def _table() -> Panel:
    text = Text(
        "Both runs",
        f"How do the two runs differ, over the whole time range? {HOW}",
        "No run matches the choice above",
    )
    columns = [
        Column("Run", label="run"),
        Column("Reserved, fullest GPU", compare.over_range("max_over_time", recorded.RUN_RESERVED_MAX), unit=BYTES),
        Column("Slack at peak", compare.over_range("last_over_time", recorded.RUN_SLACK), unit=RATIO, bar=True),
        Column("Most stranded", compare.over_range("max_over_time", recorded.RUN_STRANDED_RATIO), unit=RATIO, bar=True),
        Column("Least headroom", compare.over_range("min_over_time", recorded.RUN_HEADROOM), unit=BYTES),
        Column("Retries, worst minute", f"60 * {compare.over_range('max_over_time', recorded.RUN_RETRIES)}",
               unit=PER_MINUTE),
        Column("OOMs, worst hour", compare.ooms()),
        Column("Step, mean", compare.over_range("avg_over_time", recorded.RUN_STEP), unit=SECONDS),
    ]  # fmt: skip
    return joined_table(text, columns).height(6)


def _reserved() -> Panel:
    text = Text(
        "Reserved, both runs",
        f"How much does the fullest GPU of each run hold over time? {HOW}",
        EMPTY,
    )
    return lines(text, [Query(compare.now(recorded.RUN_RESERVED_MAX), "{{run}}")], BYTES)


def _steps() -> Panel:
    text = Text("Step duration, both runs", f"How long are the steps of each run? {HOW}", EMPTY)
    return lines(text, [Query(compare.now(recorded.RUN_STEP), "{{run}}")], SECONDS)
