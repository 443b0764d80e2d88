"""The row of numbers that answers first."""

from __future__ import annotations

from dashboards import common
from dashboards.colors import STATES
from dashboards.panels import Panel, Query, Text, stat_panel
from dashboards.panels.units import BYTES, COUNT, RATIO, SECONDS
from dashboards.queries import ranks


def panels() -> list[Panel]:
    """Six numbers in one line."""
    return [_states(), _ooms(), _headroom(), _exhaustion(), _stranded(), _retries()]


def _states() -> Panel:
    text = Text(
        "Ranks by state",
        "What do the training processes do now? stalled: alive, but no step for a while. oom and killed: ended that "
        "way, or the newest step failed for lack of memory; shown for 15 minutes.",
        "No ranks",
    )
    return stat_panel(text, Query(ranks.by_state(), "{{state}}"), COUNT, colors=STATES)


def _ooms() -> Panel:
    text = Text(
        "Out of memory",
        "How often did the processes seen in the chosen time range raise OutOfMemoryError, caught by the script or "
        "not? Counted since each process started.",
    )
    return stat_panel(text, Query(ranks.ooms_in_range()), COUNT, warn_above=1)


def _headroom() -> Panel:
    text = Text(
        "Least headroom",
        "How large a tensor could the tightest rank still allocate, after the allocator has given back its cache? A "
        "request above it ends in an OutOfMemoryError.",
        "No snapshot yet",
    )
    return stat_panel(text, Query(ranks.least_headroom(), common.RANK), BYTES)


def _exhaustion() -> Panel:
    text = Text(
        "First runs out in",
        "When will the first rank run out, if its headroom goes on falling as in the last 15 minutes? Empty is good: "
        "no rank's headroom falls.",
        "Does not fall",
    )
    return stat_panel(text, Query(ranks.soonest_exhaustion(), common.RANK), SECONDS)


def _stranded() -> Panel:
    text = Text(
        "Most stranded",
        "How much of its device is lost to fragmentation in the worst rank: free, but pinned between live blocks? "
        "From 5 % on it is worth acting, if there are retries too.",
        "No snapshot yet",
    )
    return stat_panel(text, Query(ranks.most_stranded(), common.RANK), RATIO, warn_above=0.05)


def _retries() -> Panel:
    text = Text(
        "Retries in 10 minutes",
        "How often did the allocators have to give back their whole cache to serve a request? Each one stops all "
        "streams; a healthy job has none after its first steps.",
    )
    return stat_panel(text, Query(ranks.recent_retries()), COUNT, warn_above=1)
