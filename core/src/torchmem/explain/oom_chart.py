"""The chart that leads to an OutOfMemoryError, which is its last point."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.explain.oom_report import OomReport
from torchmem.explain.run_chart import Chart, ChartLine, OomMoment, lines, run_chart

_COLORS = {"allocated": "in_use", "reserved": "--soft", "stranded": "stranded", "headroom": "--ink"}
"""Names of the columns of the trend."""


def oom_charts(report: OomReport) -> tuple[Chart, ...]:
    """Return the charts of the whole run and of the minutes before, as far as they are known."""
    return tuple(filter(None, (whole_run(report), _minutes_before(report))))


def whole_run(report: OomReport) -> Chart | None:
    """Return the chart of the run up to the OOM; None in reports without its history."""
    allocator, layout = report.device.allocator, report.layout
    end = OomMoment(
        step=report.steps.count + 1,
        allocated=allocator.allocated_bytes.total if allocator else None,
        peak=allocator.active_peak_bytes if allocator else None,
        stranded=layout.stranded_bytes if layout else None,
        outside=report.outside_bytes,
    )
    return run_chart(report.device.run_history, report.device.total_bytes, end)


def _minutes_before(report: OomReport) -> Chart | None:
    seconds = report.trend.seconds
    if not seconds or list(seconds) != sorted(seconds, reverse=True) or seconds[-1] < 0:
        return None
    columns = [
        ChartLine(name, _COLORS[name], column, fill=name == "allocated", dash=name == "headroom")
        for name, column in trend_columns(report)
    ]
    x = (*(-value for value in seconds), 0.0)
    total = report.device.total_bytes
    return Chart("The minutes before", "before", x, lines(columns), total, oom=True)


def trend_columns(report: OomReport) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Yield the name and the values of each series of the trend; the OOM is the last value."""
    trend, allocator, layout = report.trend, report.device.allocator, report.layout
    yield (
        "allocated",
        (*trend.allocated_bytes, allocator.allocated_bytes.total if allocator else None),
    )
    yield "reserved", (*trend.reserved_bytes, report.reserved_bytes)
    yield "stranded", (*trend.stranded_bytes, layout.stranded_bytes if layout else None)
    yield "headroom", (*trend.headroom_bytes, layout.headroom_flush_bytes if layout else None)
