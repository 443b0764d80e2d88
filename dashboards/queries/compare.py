"""Two runs beside each other: the chosen one and the one chosen in `compare`."""

from __future__ import annotations

from dashboards.queries import recorded
from dashboards.queries.select import RUN_ROW, row, select

from torchmem.sample.catalog import MetricSpec

BOTH, OTHER = '"$run|$compare"', '"$compare"'


def over_range(function: str, spec: MetricSpec) -> str:
    """One value per run, the chosen and the compared one, over the dashboard's time range."""
    return row(RUN_ROW, f"{function}({_selector(spec, BOTH)}[$__range])")


def now(spec: MetricSpec) -> str:
    """One line per run, the chosen and the compared one."""
    return row(RUN_ROW, _selector(spec, BOTH))


def change(function: str, spec: MetricSpec) -> str:
    """The chosen run's value minus the compared one's."""
    chosen, other = (
        f"max({function}({_selector(spec, runs)}[$__range]))" for runs in ('"$run"', OTHER)
    )
    return f"{chosen} - {other}"


def ooms() -> str:
    """OutOfMemoryErrors of each run, at most in any hour."""
    return f"sum by (run) (max_over_time({_selector(recorded.RUN_OOMS, BOTH)}[$__range]))"


def _selector(spec: MetricSpec, runs: str) -> str:
    return select(spec).replace('"$run"', runs)
