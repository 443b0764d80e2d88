"""The rules that the yardstick compares: the shipped one, and what was shipped or tried before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from experiments.prediction.yardstick import Rule
from support.promql import selectors

RULES = Path(__file__).resolve().parents[2] / "prometheus" / "rules"
ALERT = "TorchmemOutOfMemoryPredicted"
PLAN_ALERT = "TorchmemPlannedBatchTooLarge"
FILES = (
    "recording-memory.yml",
    "recording-trends.yml",
    "recording-prediction.yml",
    "alerts-memory.yml",
)
LIVE = "and on (job, instance, rank, pid, run) rank:torchmem_process_state:live"
_UNITS: Mapping[str, float] = {"s": 1, "m": 60, "h": 3600}


def shipped(name: str = ALERT) -> Rule:
    """Return an alert of prometheus/rules, with the recording rules that it needs."""
    rules = [
        {**rule, "interval_seconds": _seconds(group["interval"])} if "interval" in group else rule
        for name in FILES
        for group in yaml.safe_load((RULES / name).read_text())["groups"]
        for rule in group["rules"]
    ]
    (alert,) = (rule for rule in rules if rule.get("alert") == name)
    records = _needed(alert["expr"], [rule for rule in rules if "record" in rule])
    condition, _, kept = alert["expr"].partition(" or last_over_time(")
    return Rule("shipped", condition, _seconds(alert["for"]), tuple(records), _seconds(kept))


def _needed(expression: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the recording rules that an expression reads, in the order of the files."""
    wanted = {name for name, _ in selectors(expression)}
    while True:
        found = [rule for rule in records if rule["record"] in wanted]
        more = {name for rule in found for name, _ in selectors(rule["expr"])}
        if more <= wanted:
            return found
        wanted |= more


def _seconds(duration: str) -> float:
    return sum(float(value) * _UNITS[unit] for value, unit in re.findall(r"(\d+)([smh])", duration))


def normalized(rule: Rule) -> list[str]:
    """Return the expressions of a rule in one form; equal rules have equal forms."""
    expressions = [*(record["expr"] for record in rule.records), rule.alert]
    forms = [promql_parser.parse(expression).prettify() for expression in expressions]
    return [*forms, f"for {rule.for_seconds:g} s, kept for {rule.keep_seconds:g} s"]


def _records(pairs: Iterable[tuple[str, str, str]]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"record": name, "expr": expression, "labels": {"pace": pace} if pace else {}}
        for name, expression, pace in pairs
    )


BASE = (
    (
        "rank:torchmem_process_state:live",
        'max without (state) (torchmem_process_state{state=~"running|stalled"} == 1)',
        "",
    ),
    (
        "rank:torchmem_reserved_bytes:sum",
        f"sum without (pool) (torchmem_reserved_bytes) {LIVE}",
        "",
    ),
)
HEADROOM = "rank:torchmem_headroom_bytes:min5m"
EXHAUSTION = "rank:torchmem_headroom_exhaustion:seconds"
_FLUSHED = 'min_over_time(torchmem_headroom_bytes{flush="true"}[5m])'
HEADROOM_RECORDS = _records(
    (
        *BASE,
        (HEADROOM, f"min without (flush) ({_FLUSHED}) {LIVE}", ""),
        (EXHAUSTION, f"{HEADROOM} / -(deriv({HEADROOM}[15m]) < 0)", ""),
    )
)
"""A line through 15 minutes of the lowest headroom."""


def _falls(series: str, minutes: int, share: float) -> str:
    """Return that a series fell by a share of the device in each of the last three intervals."""
    offsets = ["", *(f" offset {minutes * count}m" for count in (1, 2, 3))]
    return " and ".join(
        f"({series}{before} - {series}{after}) / torchmem_device_total_bytes > {share}"
        for after, before in pairwise(offsets)
    )


LINE = Rule("that line alone, as panels showed it", f"{EXHAUSTION} < 3600", 0, HEADROOM_RECORDS)
BEFORE = Rule(
    "first: a line through headroom, falling in each of three 5 min",
    f"{EXHAUSTION} < 3600 and {_falls(HEADROOM, 5, 0.005)} "
    "and on (job, instance, rank, pid, run) torchmem_steps_total offset 15m > 0",
    60,
    HEADROOM_RECORDS,
)
"""What was shipped first."""

MARGIN = "rank:torchmem_peak_margin:tried"


@dataclass(frozen=True, slots=True)
class Pace:
    """A condition on how fast the margin falls.

    At the pace of the last `seconds`, the margin reaches `left` within `within` seconds. It is
    below `below`, and each third of the time took more than `fall`, all as shares of the device. If
    `is_steady`, the last third took at least half as much as the first.
    """

    seconds: int
    left: float
    within: int
    below: float
    fall: float
    is_steady: bool

    def expression(self) -> str:
        """Return the condition."""
        at = ["", *(f" offset {self.seconds * count // 3}s" for count in (1, 2, 3))]
        falls = [f"({MARGIN}{before} - {MARGIN}{after})" for after, before in pairwise(at)]
        left = f"clamp_min({MARGIN} - {self.left}, 0)"
        rate = f"(({MARGIN}{at[3]} - {MARGIN} > 0) / {self.seconds})"
        soon = f"{left} / {rate} < {self.within} and {MARGIN} < {self.below}"
        steady = [f"{falls[0]} > 0.5 * {falls[2]}"] if self.is_steady else []
        return " and ".join([soon, *(f"{fall} > {self.fall}" for fall in falls), *steady])


def _two_paces(name: str, free: str, *paces: Pace, is_lowest: bool = False) -> Rule:
    """Return a rule on the margin at the peak, which falls at one of two paces."""
    stranded = 'min_over_time(torchmem_free_bytes{state="stranded"}[10m])'
    peak = f"rank:torchmem_reserved_bytes:sum + {free} - torchmem_active_peak_bytes"
    margin = f"({peak} - ignoring (state) {stranded}) / torchmem_device_total_bytes"
    expression = " or ".join(f"({pace.expression()})" for pace in paces)
    if is_lowest:
        lowest = f"{MARGIN} < min_over_time({MARGIN}[1h] offset 15m)"
        steps = "on (job, instance, rank, pid, run) torchmem_steps_total offset 10m > 0"
        expression = f"({expression}) and {lowest} and {steps}"
    return Rule(name, expression, 60, _records((*BASE, (MARGIN, margin, ""))), 600 * is_lowest)


NVML = "on (job, instance, uuid) group_left () nvml_memory_free_bytes"
SDK = "torchmem_driver_free_bytes"
FIRST = Pace(300, 0.06, 900, 0.21, 0.0002, True), Pace(900, 0.02, 3600, 0.12, 0.0002, True)
FIXED = Pace(240, 0.02, 300, 1, 0, False), Pace(600, 0.02, 1200, 0.12, 0.0005, True)
CANDIDATES = (
    _two_paces("before: down to 2% of the GPU", SDK, *FIXED, is_lowest=True),
    BEFORE,
    LINE,
    _two_paces("peak margin at two paces, free memory by NVML", NVML, *FIRST),
    _two_paces("the same, free memory by the SDK", SDK, *FIRST),
)


def without_history(rule: Rule) -> Rule:
    """Return the shipped rule without its comparison with the last hour."""
    changed = tuple(
        {**record, "expr": re.sub(r"and rank:\S+\s*<\s*min_over_time\(.*?\)", "", record["expr"])}
        for record in rule.records
    )
    return replace(rule, name="shipped, also above the lowest of the hour", records=changed)


EARLIER_RUNS = r"(?s)unless on \([^)]*uuid[^)]*\).*"
"""How the shipped rule compares with them, up to its end."""


def without_earlier_runs(rule: Rule) -> Rule:
    """Return the shipped rule without its comparison with earlier runs of the same name."""
    changed = tuple(
        {**record, "expr": re.sub(EARLIER_RUNS, "", record["expr"])} for record in rule.records
    )
    return replace(rule, name="shipped, without earlier runs of the name", records=changed)


def without_keeping(rule: Rule) -> Rule:
    """Return the shipped rule without `keep_firing_for`."""
    return replace(rule, name="shipped, without keep_firing_for", keep_seconds=0.0)
